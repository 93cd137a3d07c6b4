//! Children and the descriptors of their process. The test has a process of its own: programs that
//! other tests start hold copies of descriptors for a moment, too.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ramet_sys::{open_in_child, unmount_in_child};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

const PATIENCE: Duration = Duration::from_secs(10);

fn mount_and_unmount(dir: &Path) -> io::Result<()> {
    let file = File::create(dir.join("file"))?;
    std::thread::sleep(Duration::from_micros(300));
    drop(file);
    unmount_in_child(dir, 0)?;
    Ok(mount("none", dir, "tmpfs", MountFlags::empty(), None)?)
}

#[test]
fn file_that_is_closed_while_a_child_begins_does_not_keep_its_mount() {
    let dir = tempfile::tempdir().unwrap();
    let (other, dir) = (tempfile::NamedTempFile::new().unwrap(), dir.path());
    if mount("none", dir, "tmpfs", MountFlags::empty(), None) == Err(rustix::io::Errno::PERM) {
        println!("no right to mount a file system");
        return;
    }
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    open_in_child(other.path(), b"", PATIENCE).unwrap();
                }
            });
        }
        let rounds = (0..60).try_for_each(|_| mount_and_unmount(dir));
        is_over.store(true, Ordering::Relaxed);
        // A round that failed may have left the directory unmounted.
        let unmounted = unmount(dir, UnmountFlags::DETACH);
        rounds.unwrap();
        unmounted.unwrap();
    });
}
