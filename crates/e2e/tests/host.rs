//! Volumes on a host that is full, or is being shut down.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ramet_e2e::{Bed, Mount, ramet_bin, run, run_ok, until};
use rustix::mount::UnmountFlags;
use rustix::process::{Signal, kill_process};
use serde_json::json;

/// A file system with a limit below a bed, unmounted in every case.
struct Host(PathBuf);

impl Host {
    fn new(bed: &Bed, mib: u32) -> Host {
        let dir = bed.path().join("host");
        fs::create_dir(&dir).expect("ours");
        let host = Host(dir);
        host.mount(&format!("size={mib}M"));
        host
    }

    /// The same as a btrfs on a loop device.
    fn btrfs(bed: &Bed) -> Host {
        let (image, dir) = (bed.path().join("btrfs"), bed.path().join("host"));
        let file = File::create(&image).expect("ours");
        file.set_len(512 << 20).expect("ours");
        fs::create_dir(&dir).expect("ours");
        run_ok("mkfs.btrfs", &["-q".as_ref(), image.as_os_str()]);
        let args = ["-o", "loop"].map(OsStr::new);
        run_ok(
            "mount",
            &[&args[..], &[image.as_ref(), dir.as_ref()]].concat(),
        );
        Host(dir)
    }

    /// Takes all room that is left.
    fn fill(&self) {
        for bytes in [1 << 20, 4096] {
            let mut file = File::create(self.0.join(format!("{bytes}"))).expect("ours");
            while file.write_all(&vec![7; bytes]).is_ok() {}
            let _ = file.sync_all();
        }
    }

    fn resize(&self, mib: u32) {
        self.mount(&format!("remount,size={mib}M"));
    }

    fn mount(&self, options: &str) {
        let args = ["-t", "tmpfs", "-o", options, "ramet-host"].map(OsStr::new);
        run_ok("mount", &[&args[..], &[self.0.as_ref()]].concat());
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, UnmountFlags::DETACH);
    }
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("not root: no tmpfs can be mounted");
    }
    is_root
}

/// Noise that tells which file it is of.
fn contents(number: u32) -> Vec<u8> {
    let mut state = u64::from(number) + 1;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005) + 1;
        (state >> 33) as u8
    };
    std::iter::repeat_with(next).take(300_000).collect()
}

/// Writes and syncs files from `first` on until there is no room; returns the number of the first
/// one that is not there.
fn fill(mount: &Mount, first: u32) -> u32 {
    for number in first.. {
        let path = mount.root().join(format!("f{number}"));
        let written = File::create(&path).and_then(|mut file| {
            file.write_all(&contents(number))?;
            file.sync_all()
        });
        match written {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::StorageFull => {
                fs::remove_file(&path)
                    .or_else(not_there)
                    .expect("removing on a full host");
                return number;
            }
            Err(error) => panic!("file {number}: {error}"),
        }
    }
    unreachable!("a host has an end")
}

fn not_there(error: std::io::Error) -> std::io::Result<()> {
    match error.kind() {
        ErrorKind::NotFound => Ok(()),
        _ => Err(error),
    }
}

fn check(mount: &Mount, numbers: impl IntoIterator<Item = u32>) {
    for number in numbers {
        let found = fs::read(mount.root().join(format!("f{number}")));
        assert!(
            found.expect("it was synced") == contents(number),
            "file {number}"
        );
    }
}

fn available_mib(mount: &Mount) -> u64 {
    let found = rustix::fs::statvfs(mount.root()).expect("it is mounted");
    (found.f_bavail * found.f_frsize) >> 20
}

#[test]
fn a_volume_on_a_full_host_goes_on_when_there_is_room_again() {
    if !is_root() {
        return;
    }
    let bed = Bed::without_volume();
    let host = Host::new(&bed, 40);
    let image = host.0.join("image");
    let made = run(
        ramet_bin(),
        &[
            "mkfs".as_ref(),
            "--size".as_ref(),
            "1G".as_ref(),
            image.as_os_str(),
        ],
    );
    let said = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success() && said.contains("warning"), "{said}");
    std::os::unix::fs::symlink(&image, bed.volume()).expect("ours");

    let mount = bed.mount(&[]);
    let promised = available_mib(&mount);
    assert!((20..40).contains(&promised), "{promised} MiB are promised");
    let end = fill(&mount, 0);
    println!("{end} files of {promised} MiB");
    assert!(end > 60, "{end} files");
    assert!(available_mib(&mount) < 8);
    check(&mount, 0..end);
    run_ok(ramet_bin(), &[OsStr::new("sync"), mount.root().as_ref()]);

    // Removing makes room, and so does the host.
    for number in (0..end).step_by(2) {
        fs::remove_file(mount.root().join(format!("f{number}"))).expect("removing on a full host");
    }
    let kept = (0..end).skip(1).step_by(2);
    run_ok(
        ramet_bin(),
        &[
            OsStr::new("sync"),
            "--checkpoint".as_ref(),
            mount.root().as_ref(),
        ],
    );
    let second = fill(&mount, 1000);
    assert!(second - 1000 > end / 4, "{} files", second - 1000);
    host.resize(80);
    let third = fill(&mount, 2000);
    assert!(third - 2000 > 90, "{} files", third - 2000);
    let all = || kept.clone().chain(1000..second).chain(2000..third);
    check(&mount, all());
    let stat = mount.stat();
    assert!(stat["poisoned"].is_null(), "{stat}");
    assert!(
        stat["host_allocated_bytes"].as_u64() > Some(60 << 20),
        "{stat}"
    );

    // A crash on a full host.
    mount.kill_daemon();
    mount.detach_dead();
    let mount = bed.mount(&[]);
    check(&mount, all());
    mount.umount();
    bed.fsck();
}

/// btrfs copies blocks that are written over, and takes room for that, unless a file says not to.
#[test]
fn a_volume_on_a_full_btrfs_removes_and_is_mounted_again() {
    if !is_root() {
        return;
    }
    let bed = Bed::without_volume();
    let host = Host::btrfs(&bed);
    // Its files are compressed, and written at other places each time, if nobody says otherwise.
    let dir = host.0.join("compressed");
    fs::create_dir(&dir).expect("ours");
    run_ok("chattr", &["+c".as_ref(), dir.as_os_str()]);
    let image = dir.join("image");
    let size = ["mkfs", "--size", "4G"].map(OsStr::new);
    run_ok(ramet_bin(), &[&size[..], &[image.as_os_str()]].concat());
    std::os::unix::fs::symlink(&image, bed.volume()).expect("ours");
    let mount = bed.mount(&[]);
    for number in 0..200 {
        let path = mount.root().join(format!("f{number}"));
        fs::write(path, contents(number)).expect("there is room");
    }
    run_ok(ramet_bin(), &[OsStr::new("sync"), mount.root().as_ref()]);
    host.fill();
    for number in 0..100 {
        fs::remove_file(mount.root().join(format!("f{number}"))).expect("removing on a full host");
    }
    let args = ["sync", "--checkpoint"].map(OsStr::new);
    run_ok(ramet_bin(), &[&args[..], &[mount.root().as_ref()]].concat());
    let added = 1000..1050;
    for number in added.clone() {
        let mut file = File::create(mount.root().join(format!("f{number}"))).expect("room");
        file.write_all(&contents(number)).expect("there is room");
        file.sync_all().expect("there is room");
    }
    mount.kill_daemon();
    mount.detach_dead();
    let mount = bed.mount(&[]);
    check(&mount, (100..200).chain(added));
    mount.umount();
    bed.fsck();
}

/// A file of 64 MiB without contents, which can be mapped.
fn sparse_file(path: &Path) -> File {
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
        .expect("there is room");
    file.set_len(64 << 20).expect("a length takes no room");
    file
}

#[test]
fn a_write_back_that_failed_earlier_does_not_keep_a_volume_mounted() {
    let bed = Bed::new("64M");
    let mount = bed.mount(&[]);
    let sparse = mount.root().join("sparse");
    let file = sparse_file(&sparse);
    fill(&mount, 0);
    let store = |count: u64| {
        for page in 0..count {
            let bytes = &contents(7)[..4096];
            ramet_sys::write_mapped(&file, page * 4096, bytes).expect("a page is cached");
        }
    };
    store(4096);
    let told = file.sync_all().expect_err("there is no room for 16 MiB");
    assert_eq!(told.kind(), ErrorKind::StorageFull);
    assert!(mount.stat()["failed_write_backs"].as_u64() > Some(0));
    for entry in fs::read_dir(mount.root()).expect("it is mounted") {
        fs::remove_file(entry.expect("listed").path()).expect("removing on a full volume");
    }
    drop(file);
    fs::write(mount.root().join("small"), "kept").expect("there is room again");
    mount.umount();
    bed.fsck();

    let mount = bed.mount(&[]);
    assert_eq!(
        fs::read(mount.root().join("small")).expect("synced"),
        b"kept"
    );
    mount.umount();
    bed.fsck();
}

#[test]
fn a_mount_waits_for_the_daemon_of_the_last_one() {
    if !is_root() {
        return;
    }
    let bed = Bed::new("64M");
    let mount = bed.mount(&[]);
    fs::write(mount.root().join("file"), "before").expect("there is room");
    // As if it were long at closing the volume.
    kill_process(mount.pid(), Signal::STOP).expect("it is ours");
    rustix::mount::unmount(mount.root(), UnmountFlags::DETACH).expect("nobody uses it");
    let args = [
        OsStr::new("mount"),
        bed.volume().as_ref(),
        bed.mount_point().as_ref(),
    ]
    .map(OsStr::to_owned);
    let mut next = Command::new(ramet_bin())
        .args(args)
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut said = BufReader::new(next.stderr.take().expect("a pipe"));
    let mut line = String::new();
    said.read_line(&mut line).expect("a pipe");
    kill_process(mount.pid(), Signal::CONT).expect("it is ours");
    assert!(line.contains("waiting"), "{line}");
    let status = next.wait().expect("it ends");
    said.read_to_string(&mut line).expect("a pipe");
    assert!(status.success(), "{line}");
    mount.is_unmounted();
    let mount = bed.mounted();
    assert_eq!(
        fs::read(mount.root().join("file")).expect("there"),
        b"before"
    );
    mount.umount();
    bed.fsck();
}

#[test]
fn a_busy_mount_that_is_told_to_end_loses_nothing_acknowledged() {
    let bed = Bed::new("64M");
    let mount = bed.mount(&[]);
    let busy = File::create_new(mount.root().join("busy")).expect("there is room");
    fs::write(mount.root().join("closed"), contents(1)).expect("there is room");
    busy.write_all_at(b"before", 0).expect("there is room");
    kill_process(mount.pid(), Signal::TERM).expect("it is ours");
    // The signal makes the written bytes durable; the answer of a sync says so.
    busy.write_all_at(b"after!", 6).expect("it is served");
    busy.sync_all().expect("it is served");
    // The daemon had mapped files written back, and the process that asked for that is told.
    until("the process of the daemon has ended", || {
        mount.stat()["own_processes"] == json!({"begun": 1, "running": 0})
    });
    mount.kill_daemon();
    drop(busy);
    mount.detach_dead();
    let mount = bed.mount(&[]);
    let read = |name: &str| fs::read(mount.root().join(Path::new(name))).expect("it was synced");
    assert_eq!(read("busy"), b"beforeafter!");
    assert!(read("closed") == contents(1));
    mount.umount();
    bed.fsck();
}
