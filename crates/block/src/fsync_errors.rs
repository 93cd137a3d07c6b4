//! Syncs of one file by several threads; none takes an error away from another.
//!
//! The kernel tells an error of writing back once to each open file description, and the first call
//! gets it. With one description, the sync of a checkpoint could be told that bytes of the journal
//! were lost, and the journal's own sync, which overlaps it, that all is well. So each sync has a
//! description to itself while it runs. The descriptions are opened before anything is written,
//! since the kernel does not tell a later one of an error that others know. After the first error
//! no sync succeeds.

use std::fs::File;
use std::io;
use std::sync::OnceLock;

use parking_lot::{Mutex, MutexGuard};

use crate::write_behind::path_of;

/// Descriptions of one file to sync it by, and the first error.
#[derive(Debug)]
pub(crate) struct Fsync {
    first: Mutex<File>,
    /// `None` where a file cannot be opened by its descriptor (no `/proc`): syncs follow each other
    /// then.
    second: Option<Mutex<File>>,
    failed: OnceLock<(io::ErrorKind, Option<i32>)>,
}

impl Fsync {
    /// For the file that is open as `file`, before it is written.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        Ok(Self {
            first: Mutex::new(file.try_clone()?),
            second: File::open(path_of(file)).ok().map(Mutex::new),
            failed: OnceLock::new(),
        })
    }

    /// Calls `sync` with a description that no other call of this syncs by meanwhile.
    ///
    /// # Errors
    /// That of this sync or of any before it.
    pub(crate) fn run(&self, sync: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
        let file = self.idle();
        self.check()?;
        let done = sync(&file);
        if let Err(error) = &done {
            // Before the description is given back: the kernel tells its next user nothing.
            self.failed
                .get_or_init(|| (error.kind(), error.raw_os_error()));
        }
        done
    }

    fn idle(&self) -> MutexGuard<'_, File> {
        match (&self.second, self.first.try_lock()) {
            (_, Some(first)) => first,
            (Some(second), None) => second.lock(),
            (None, None) => self.first.lock(),
        }
    }

    fn check(&self) -> io::Result<()> {
        self.failed.get().map_or(Ok(()), |(kind, code)| {
            Err(code.map_or_else(|| (*kind).into(), io::Error::from_raw_os_error))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::os::fd::AsRawFd;
    use std::sync::Barrier;

    use super::*;

    /// Tells a loss once to each description, as the kernel does.
    #[derive(Default)]
    struct Kernel(Mutex<BTreeSet<i32>>);

    impl Kernel {
        fn sync(&self, file: &File) -> io::Result<()> {
            let is_new = self.0.lock().insert(file.as_raw_fd());
            let lost = || io::Error::from_raw_os_error(5);
            if is_new { Err(lost()) } else { Ok(()) }
        }
    }

    #[test]
    fn an_error_is_told_to_all_syncs_that_overlap_and_to_all_after_them() {
        let fsync = Fsync::new(&tempfile::tempfile().unwrap()).unwrap();
        let (kernel, both) = (Kernel::default(), Barrier::new(2));
        std::thread::scope(|scope| {
            let overlapping = [0; 2].map(|_| {
                scope.spawn(|| {
                    fsync.run(|file| {
                        both.wait();
                        kernel.sync(file)
                    })
                })
            });
            for sync in overlapping {
                let told = sync.join().unwrap().unwrap_err();
                assert_eq!(told.raw_os_error(), Some(5));
            }
        });
        for _ in 0..3 {
            let told = fsync.run(|file| kernel.sync(file)).unwrap_err();
            assert_eq!(told.raw_os_error(), Some(5));
        }
    }

    #[test]
    fn syncs_follow_each_other_where_there_is_one_description() {
        let mut fsync = Fsync::new(&tempfile::tempfile().unwrap()).unwrap();
        fsync.second = None;
        let kernel = Kernel::default();
        std::thread::scope(|scope| {
            let all = [0; 4].map(|_| scope.spawn(|| fsync.run(|file| kernel.sync(file))));
            for sync in all {
                assert!(sync.join().unwrap().is_err());
            }
        });
    }
}
