//! A mount whose process is killed in the middle of mounting lets every program go that looked at
//! it.
//!
//! Needs `/dev/fuse`, and root or fusermount3. Steps are named by `failpoints::die_at`.
#![cfg(failpoints)]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ramet_block::{Device, MemDevice};
use ramet_fs::{FormatOptions, OpenOptions, Volume};
use ramet_fuse::{MountOptions, Transport, mount};

/// Steps of a mount, in their order, and whether each comes with requests through `/dev/fuse` and
/// through rings. The kernel asks for capabilities of a file if it is to clear them.
const STEPS: [(&str, bool, bool); 9] = [
    ("mounted", true, true),
    ("agreed", true, true),
    ("registered", false, true),
    ("before-readers", true, true),
    ("served", true, true),
    ("probe-lookup", true, true),
    ("probe-capabilities", true, true),
    ("probe-write", true, true),
    ("probed", true, true),
];

/// How long any program may take, which is done in milliseconds.
const PATIENCE: Duration = Duration::from_secs(8);

fn ends(child: &mut Child) -> Option<ExitStatus> {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

/// Unmounts, and ends every wait for an answer where the test failed.
fn abort_and_unmount(dir: &Path) {
    let force = Command::new("umount")
        .arg("-f")
        .arg(dir)
        .stderr(Stdio::null())
        .status();
    let lazy = Command::new("umount")
        .arg("-l")
        .arg(dir)
        .stderr(Stdio::null())
        .status();
    let helper = Command::new("fusermount3")
        .arg("-uz")
        .arg(dir)
        .stderr(Stdio::null())
        .status();
    drop((force, lazy, helper));
}

/// The process that is killed; the test below starts it.
#[test]
#[ignore = "it dies"]
fn process_that_mounts() {
    let dir = std::env::var_os("RAMET_DIES_IN").unwrap();
    let transport = match std::env::var("RAMET_DIES_WITH").unwrap().as_str() {
        "rings" => Transport::Ring,
        _ => Transport::Device,
    };
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let volume = Volume::open(device, OpenOptions::default()).unwrap();
    let options = MountOptions {
        transport,
        ..MountOptions::new("test")
    };
    let mounted = mount(volume, Path::new(&dir), &options).unwrap();
    panic!("it lives: {:?}", mounted.no_rings());
}

/// Kills a process that mounts at `step`, while another program looks at the mount point.
fn kill_at(step: &str, transport: &str) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let (point, looks) = (dir.path().join("mnt"), dir.path().join("looks"));
    fs::create_dir(&point).unwrap();
    fs::write(&looks, "").unwrap();
    let mut onlooker = Command::new("sh")
        .arg("-c")
        .arg("while [ -e looks ]; do ls mnt/. ; done")
        .current_dir(dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut dying = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "process_that_mounts", "--ignored", "--nocapture"])
        .env("RAMET_DIES_AT", step)
        .env("RAMET_DIES_IN", &point)
        .env("RAMET_DIES_WITH", transport)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let died = ends(&mut dying);
    fs::remove_file(&looks).unwrap();
    let looked = ends(&mut onlooker);
    abort_and_unmount(&point);
    match died {
        None => return Err(format!("{step}, {transport}: the killed process stays")),
        Some(status) if status.signal() != Some(9) => {
            return Err(format!("{step}, {transport}: not killed, {status}"));
        }
        Some(_) => {}
    }
    match looked {
        None => Err(format!("{step}, {transport}: an onlooker waits")),
        Some(_) => Ok(()),
    }
}

#[test]
fn nobody_waits_for_a_mount_that_is_killed_at_any_step() {
    let switch = fs::read_to_string("/sys/module/fuse/parameters/enable_uring");
    let has_rings = switch.is_ok_and(|text| text.trim() == "Y");
    let mut failed = Vec::new();
    for (step, by_device, by_rings) in STEPS {
        if by_device {
            failed.extend(kill_at(step, "device").err());
        }
        if by_rings && has_rings {
            failed.extend(kill_at(step, "rings").err());
        }
    }
    println!("with rings: {has_rings}");
    assert!(failed.is_empty(), "{failed:#?}");
}
