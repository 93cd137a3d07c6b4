//! Scheduling classes of the threads that answer requests. A process of its own: it looks at all threads.
//!
//! Needs `/dev/fuse`, and root.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ramet_block::{Device, MemDevice};
use ramet_fs::{FormatOptions, OpenOptions, Volume};
use ramet_fuse::{MountOptions, mount};
use rustix::io::Errno;

/// Far more than a run needs: so many times a thousand requests.
const ROUNDS: u32 = 100;
/// Far longer than a thread stays in the idle class without work.
const WAIT_MAX: Duration = Duration::from_secs(20);

/// Names of this process's threads, and whether each is in the idle class.
fn threads() -> Vec<(String, bool)> {
    let stats = fs::read_dir("/proc/self/task").unwrap();
    let stats = stats.filter_map(|task| fs::read_to_string(task.unwrap().path().join("stat")).ok());
    let thread = |stat: String| {
        let (head, fields) = stat.rsplit_once(") ").unwrap();
        let (_, name) = head.split_once('(').unwrap();
        // The 41st field of all, the 39th after the name.
        let is_idle = fields.split(' ').nth(38).unwrap() == "5";
        (name.to_owned(), is_idle)
    };
    stats.map(thread).collect()
}

fn ask(path: &Path) {
    let missing = rustix::fs::getxattr(path, "user.missing", &mut [0_u8; 8][..]);
    assert_eq!(missing, Err(Errno::NODATA));
}

#[test]
fn threads_defer_to_one_program_and_stop_when_it_rests() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(1 << 28));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let volume = Volume::open(device, OpenOptions::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mounted = mount(Arc::clone(&volume), dir.path(), &MountOptions::new("test")).unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "contents").unwrap();

    let has_rings = threads().iter().any(|(name, _)| name.starts_with("ring-"));
    let any_defers = || threads().iter().any(|(_, is_idle)| *is_idle);
    let ever_defer = (0..ROUNDS).any(|_| {
        (0..1000).for_each(|_| ask(&file));
        any_defers()
    });
    assert_eq!(ever_defer, has_rings);
    let start = Instant::now();
    while any_defers() {
        assert!(start.elapsed() < WAIT_MAX, "{:?}", threads());
        std::thread::sleep(Duration::from_millis(1));
    }
    ask(&file);

    mounted.unmount().unwrap();
    volume.close().unwrap();
}
