//! Times of inodes: the clock, and how reading changes the access time.

use std::sync::Arc;

use crate::clock::Clock;
use crate::format::record::{FLAG_NO_ATIME, Record, Time};
use crate::namespace::inode::Inode;
use crate::options::AccessTime;

/// Gives operations their times.
pub(crate) struct Times {
    clock: Arc<dyn Clock>,
    files: AccessTime,
    dirs: AccessTime,
}

impl Times {
    /// Times of `clock`. Reading changes access times as `files` and `dirs` say.
    pub(crate) fn new(clock: Arc<dyn Clock>, files: AccessTime, dirs: AccessTime) -> Arc<Self> {
        Arc::new(Self { clock, files, dirs })
    }

    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    /// Notes that the inode was read. Only the record in memory changes. The new time is stored
    /// with the next change of the record, and lost when the inode leaves the memory before that.
    pub(crate) fn read_now(&self, inode: &Arc<Inode>) {
        const DAY_SECS: i64 = 24 * 60 * 60;
        let how = if inode.is_dir() {
            self.dirs
        } else {
            self.files
        };
        if how == AccessTime::Never {
            return;
        }
        let now = self.now();
        let is_due = |record: &Record| {
            if record.has(FLAG_NO_ATIME) {
                return false;
            }
            how == AccessTime::Strict
                || record.atime <= record.mtime
                || record.atime <= record.ctime
                || now.secs - record.atime.secs >= DAY_SECS
        };
        if is_due(&inode.state.read()) {
            inode.state.write().atime = now;
        }
    }
}
