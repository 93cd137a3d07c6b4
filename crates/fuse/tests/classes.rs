//! Scheduling classes of the threads that answer requests. The test has a process of its own,
//! because it looks at all threads.
//!
//! Needs `/dev/fuse`, and root.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ramet_block::{Device, create_image};
use ramet_fs::{FormatOptions, OpenOptions, Volume};
use ramet_fuse::{MountOptions, mount};
use rustix::io::Errno;

/// Rounds of a thousand requests: far more than a run needs.
const ROUNDS: u32 = 100;
/// Far longer than a thread stays in the idle class without work.
const WAIT_MAX: Duration = Duration::from_secs(20);

#[derive(Debug)]
struct Thread {
    name: String,
    is_idle: bool,
    processors: String,
}

/// The threads of this process that do not end meanwhile.
fn threads() -> Vec<Thread> {
    let thread = |task: io::Result<fs::DirEntry>| {
        let task = task.ok()?.path();
        let stat = fs::read_to_string(task.join("stat")).ok()?;
        let status = fs::read_to_string(task.join("status")).ok()?;
        let (head, fields) = stat.rsplit_once(") ")?;
        let processors = status
            .lines()
            .find(|l| l.starts_with("Cpus_allowed_list:"))?;
        Some(Thread {
            name: head.split_once('(')?.1.to_owned(),
            // The 41st field of the file is the 39th after the name.
            is_idle: fields.split(' ').nth(38)? == "5",
            processors: processors.to_owned(),
        })
    };
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    tasks.filter_map(thread).collect()
}

fn send(path: &Path) {
    let missing = rustix::fs::getxattr(path, "user.missing", &mut [0_u8; 8][..]);
    assert_eq!(missing, Err(Errno::NODATA));
}

#[test]
fn threads_are_idle_for_one_program_and_normal_when_it_rests() {
    let folder = tempfile::tempdir().unwrap();
    let image = create_image(folder.path().join("image"), 1 << 28).unwrap();
    let device: Arc<dyn Device> = Arc::new(image);
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let volume = Volume::open(device, OpenOptions::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mounted = mount(Arc::clone(&volume), dir.path(), &MountOptions::new("test")).unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "contents").unwrap();

    let has_rings = threads().iter().any(|t| t.name.starts_with("ring-"));
    let any_is_idle = || threads().iter().any(|t| t.is_idle);
    let ever_idle = (0..ROUNDS).any(|_| {
        (0..1000).for_each(|_| send(&file));
        any_is_idle()
    });
    assert_eq!(ever_idle, has_rings);
    // A thread that answers requests creates the threads of the first bulk write, in its class and
    // on its processor.
    (0..1000).for_each(|_| send(&file));
    fs::write(dir.path().join("bulk"), vec![1; 4 << 20]).unwrap();
    File::open(dir.path().join("bulk"))
        .unwrap()
        .sync_all()
        .unwrap();
    let threads_now = threads();
    let here = &threads_now[0].processors;
    let writers: Vec<_> = threads_now
        .iter()
        .filter(|t| t.name == "ramet-write")
        .collect();
    assert!(!writers.is_empty());
    for writer in writers {
        assert!(!writer.is_idle && writer.processors == *here, "{writer:?}");
    }
    let start = Instant::now();
    while any_is_idle() {
        assert!(start.elapsed() < WAIT_MAX, "{:?}", threads());
        std::thread::sleep(Duration::from_millis(1));
    }
    send(&file);

    mounted.unmount().unwrap();
    volume.close().unwrap();
}
