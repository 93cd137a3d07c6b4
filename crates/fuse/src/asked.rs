//! How often the kernel asked for what.

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value};

macro_rules! operations {
    ($($operation:ident $name:literal,)*) => {
        /// A kind of request, named as in the protocol of FUSE.
        #[derive(Clone, Copy)]
        pub(crate) enum Operation {
            $($operation,)*
        }

        const NAMES: &[&str] = &[$($name,)*];
    };
}

operations! {
    Lookup "LOOKUP",
    Forget "FORGET",
    Getattr "GETATTR",
    Setattr "SETATTR",
    Readlink "READLINK",
    Mknod "MKNOD",
    Mkdir "MKDIR",
    Unlink "UNLINK",
    Rmdir "RMDIR",
    Symlink "SYMLINK",
    Rename "RENAME",
    Link "LINK",
    Open "OPEN",
    Create "CREATE",
    Read "READ",
    Write "WRITE",
    Flush "FLUSH",
    Release "RELEASE",
    Fsync "FSYNC",
    Opendir "OPENDIR",
    Readdir "READDIR",
    Readdirplus "READDIRPLUS",
    Releasedir "RELEASEDIR",
    Fsyncdir "FSYNCDIR",
    Statfs "STATFS",
    Setxattr "SETXATTR",
    Getxattr "GETXATTR",
    Listxattr "LISTXATTR",
    Removexattr "REMOVEXATTR",
    Ioctl "IOCTL",
    Fallocate "FALLOCATE",
    Lseek "LSEEK",
    CopyFileRange "COPY_FILE_RANGE",
}

/// Counters since the volume was mounted.
pub(crate) struct Asked(Vec<AtomicU64>);

impl Default for Asked {
    fn default() -> Asked {
        Asked(NAMES.iter().map(|_| AtomicU64::new(0)).collect())
    }
}

impl Asked {
    pub(crate) fn count(&self, operation: Operation) {
        self.0[operation as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Of the requests so far, those that the kernel may send in the background, for which nobody waits. WRITE is
    /// one of them only if it writes back, which is counted elsewhere.
    pub(crate) fn background(&self) -> u64 {
        use Operation::{Read, Release, Releasedir};
        let counted = [Read, Release, Releasedir].map(|operation| operation as usize);
        counted
            .map(|at| self.0[at].load(Ordering::SeqCst))
            .iter()
            .sum()
    }

    /// The counters that are not zero, by name.
    pub(crate) fn json(&self) -> Value {
        let counted = NAMES.iter().zip(&self.0);
        let counted = counted.map(|(name, count)| (*name, count.load(Ordering::Relaxed)));
        let all: Map<String, Value> = counted
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| (name.to_string(), count.into()))
            .collect();
        Value::Object(all)
    }
}
