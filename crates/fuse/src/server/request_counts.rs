//! Numbers of requests of each kind.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde_json::{Map, Value};

use crate::protocol::abi::opcode;
use crate::server::logical_count::LogicalCount;
use crate::server::own_processes::OwnProcesses;

macro_rules! names {
    ($($operation:ident)*) => {
        /// Kinds of requests, by the name of the protocol.
        const NAMES: &[(u32, &str)] = &[$((opcode::$operation, stringify!($operation)),)*];
    };
}

names! {
    LOOKUP FORGET GETATTR SETATTR READLINK SYMLINK MKNOD MKDIR UNLINK RMDIR RENAME LINK OPEN READ
    WRITE STATFS RELEASE FSYNC SETXATTR GETXATTR LISTXATTR REMOVEXATTR FLUSH OPENDIR READDIR
    RELEASEDIR FSYNCDIR GETLK SETLK SETLKW ACCESS CREATE INTERRUPT BMAP IOCTL POLL NOTIFY_REPLY
    FALLOCATE READDIRPLUS LSEEK COPY_FILE_RANGE SYNCFS TMPFILE STATX
}

/// Numbers of requests that are counted.
const COUNTED: usize = 64;

/// Counters since the volume was mounted, by the number of the operation.
pub(crate) struct RequestCounts {
    counts: [AtomicU64; COUNTED],
    has_rings: AtomicBool,
    failed_write_backs: AtomicU64,
    asked_to_forget: AtomicU64,
    staged_changes: AtomicU64,
    pub(crate) own_processes: OwnProcesses,
    /// The readable bytes that STAT tells.
    pub(crate) logical: LogicalCount,
}

impl Default for RequestCounts {
    fn default() -> RequestCounts {
        RequestCounts {
            counts: [const { AtomicU64::new(0) }; COUNTED],
            has_rings: AtomicBool::new(false),
            failed_write_backs: AtomicU64::new(0),
            asked_to_forget: AtomicU64::new(0),
            staged_changes: AtomicU64::new(0),
            own_processes: OwnProcesses::default(),
            logical: LogicalCount::default(),
        }
    }
}

impl RequestCounts {
    pub(crate) fn count(&self, operation: u32) {
        let operation = match operation {
            opcode::RENAME2 => opcode::RENAME,
            opcode::COPY_FILE_RANGE_64 => opcode::COPY_FILE_RANGE,
            operation => operation,
        };
        if let Some(count) = self.counts.get(operation as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Requests come through rings of io_uring.
    pub(crate) fn note_rings(&self) {
        self.has_rings.store(true, Ordering::Relaxed);
    }

    /// The way on which requests come.
    pub(crate) fn transport(&self) -> &'static str {
        match self.has_rings.load(Ordering::Relaxed) {
            true => "io_uring",
            false => "/dev/fuse",
        }
    }

    /// The write-back of a page that a program stored into through a mapping failed. The kernel
    /// drops the page.
    pub(crate) fn count_failed_write_back(&self) {
        self.failed_write_backs.fetch_add(1, Ordering::Relaxed);
    }

    /// The kernel was asked to forget so many inodes.
    pub(crate) fn count_asked_to_forget(&self, inodes: u64) {
        self.asked_to_forget.fetch_add(inodes, Ordering::Relaxed);
    }

    pub(crate) fn asked_to_forget(&self) -> u64 {
        self.asked_to_forget.load(Ordering::Relaxed)
    }

    /// So many changes are staged now (`server/staged_changes.rs`).
    pub(crate) fn set_staged_changes(&self, count: usize) {
        self.staged_changes.store(count as u64, Ordering::SeqCst);
    }

    pub(crate) fn staged_changes(&self) -> u64 {
        self.staged_changes.load(Ordering::Relaxed)
    }

    pub(crate) fn failed_write_backs(&self) -> u64 {
        self.failed_write_backs.load(Ordering::Relaxed)
    }

    fn get(&self, operation: u32) -> u64 {
        self.counts[operation as usize].load(Ordering::Relaxed)
    }

    /// Number of requests so far that the kernel may send in the background, for which no program
    /// waits. A WRITE is a background request only if it writes back, and those are counted
    /// elsewhere.
    pub(crate) fn background(&self) -> u64 {
        let counted = [opcode::READ, opcode::RELEASE, opcode::RELEASEDIR];
        counted
            .map(|operation| self.counts[operation as usize].load(Ordering::SeqCst))
            .iter()
            .sum()
    }

    /// The counters that are not zero, by name.
    pub(crate) fn json(&self) -> Value {
        let counted = NAMES
            .iter()
            .map(|(operation, name)| (name, self.get(*operation)));
        let all: Map<String, Value> = counted
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| (name.to_string(), count.into()))
            .collect();
        Value::Object(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_a_request_are_counted_as_one_and_unknown_ones_are_not() {
        let counts = RequestCounts::default();
        for operation in [opcode::RENAME, opcode::RENAME2, opcode::STATX, 4_000] {
            counts.count(operation);
        }
        assert_eq!(counts.json(), serde_json::json!({"RENAME": 2, "STATX": 1}));
    }
}
