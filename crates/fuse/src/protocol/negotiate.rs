//! The agreement with the kernel: for how long it may believe answers, and which requests it need
//! not send.
//!
//! The kernel begins with INIT, which offers capabilities and limits. The server takes some of
//! them. Ramet and the file system in memory that measurements compare it with take the same.

use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::abi::{self, fopen, init};
use super::request::Form;
use super::{Answer, FileHandle};

/// How long the kernel may believe an answer: for ever, near enough.
pub const TTL: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// How long the kernel may believe that a name does not exist. The time is short so that the server
/// may forget these names again (`cache/negative_dentries.rs`).
pub const MISSING_TTL: Duration = Duration::from_secs(60);
/// Bytes of one write request. The room for any answer is as long.
pub const WRITE_BYTES_MAX: u32 = 1 << 20;
/// Background requests of the kernel that are under way at a time, at most: write-back and
/// read-ahead. Also the number of waiting ones from which syncfs(2) skips files. The number is
/// larger than the requests of other programs during one round of a fence, as a rule
/// (`server/barrier.rs`), and small enough that no program waits long behind them.
pub const BACKGROUND_MAX: u16 = 1024;
/// The oldest protocol whose INIT has all fields that are answered: Linux 3.15.
const MINOR_MIN: u32 = 23;

/// The answer to OPEN, OPENDIR and FLUSH, after which the kernel does not send these requests again.
/// The kernel keeps the pages of a file and the listing of a directory that is opened again, and
/// every write is in the tree before it is answered.
pub const NEVER_AGAIN: Errno = Errno::NOSYS;

/// Capabilities that the server takes whenever the kernel offers them. Most save requests.
///
/// With POSIX_ACL the kernel decides about accesses by the access control lists that the server
/// keeps, and with SETXATTR_EXT it says when a new list clears setgid. With DONT_MASK it leaves the
/// umask to the server, which applies it where a directory has no list for new entries.
///
/// With EXPORT_SUPPORT the kernel looks up inodes by number that it has forgotten: a handle of a file
/// and an export over NFS stay good. An NFS server opens a directory again for each part of it, and
/// the cookies of a stream are good in any other. NO_OPENDIR_SUPPORT says that the kernel opens
/// directories by itself once it is told to.
///
/// The server chooses which entries of a listing come with attributes. Left to choose
/// (READDIRPLUS_AUTO), the kernel asks for those of the first entries only, keeps the listing, and
/// looks each other name up later, and the server does not know.
///
/// Two capabilities are left out. With ATOMIC_O_TRUNC, the server would truncate a file before the
/// kernel finds out that the file is a running program and refuses. With ASYNC_DIO, a write past the
/// pages, by asynchronous I/O, drops the pages before it has been carried out, and not after it. A
/// reader in between would fill them with the old contents, for good.
const WANTED: u64 = init::ASYNC_READ
    | init::BIG_WRITES
    | init::MAX_PAGES
    | init::INIT_EXT
    | init::EXPORT_SUPPORT
    | init::DO_READDIRPLUS
    | init::PARALLEL_DIROPS
    | init::HANDLE_KILLPRIV_V2
    | init::CACHE_SYMLINKS
    | init::DONT_MASK
    | init::POSIX_ACL
    | init::SETXATTR_EXT
    | init::NO_OPENDIR_SUPPORT
    | init::EXPLICIT_INVAL_DATA
    | init::DIRECT_IO_ALLOW_MMAP;

/// The handle of a file that is open past the kernel's pages. Other files have the handle 0, and so
/// has a file that the kernel opens without a request. No directory has this handle.
pub const DIRECT_HANDLE: FileHandle = FileHandle(u64::MAX);

/// The handle of a new file that is opened with these flags of FUSE.
#[must_use]
pub fn created_handle(flags: u32) -> FileHandle {
    if flags & fopen::DIRECT_IO == 0 {
        FileHandle::default()
    } else {
        DIRECT_HANDLE
    }
}

/// An INIT of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    init: abi::InitIn,
}

/// The version of the kernel, by its INIT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// The kernel speaks a later protocol. It sends another INIT after the answer with this
    /// server's version.
    Later,
    /// The kernel is too old.
    TooOld,
    /// The kernel speaks this protocol, maybe with fewer capabilities.
    Ours(Offer),
}

impl Version {
    /// Judges the version in an INIT.
    #[must_use]
    pub fn of(init: abi::InitIn) -> Self {
        match (init.major, init.minor) {
            (major, _) if major > abi::VERSION.0 => Self::Later,
            (major, minor) if major < abi::VERSION.0 || minor < MINOR_MIN => Self::TooOld,
            _ => Self::Ours(Offer { init }),
        }
    }
}

impl Offer {
    fn capabilities(&self) -> u64 {
        let low = u64::from(self.init.flags);
        if low & init::INIT_EXT == 0 {
            return low;
        }
        low | u64::from(self.init.flags2) << 32
    }

    /// Whether the kernel offers FUSE over io_uring.
    #[must_use]
    pub fn has_ring(&self) -> bool {
        self.capabilities() & init::OVER_IO_URING != 0
    }

    /// Takes the capabilities that the server wants. With `ring`, requests come through io_uring,
    /// if the kernel offers it.
    ///
    /// With `sees_all`, the server can see the credentials of every process, so that the mount may
    /// be idmapped: requests then name user and group only where they create an inode.
    #[must_use]
    pub fn take(self, ring: bool, sees_all: bool) -> Agreed {
        let way = if ring { init::OVER_IO_URING } else { 0 };
        let idmap = if sees_all { init::ALLOW_IDMAP } else { 0 };
        Agreed {
            capabilities: self.capabilities() & (WANTED | way | idmap),
            max_readahead: self.init.max_readahead,
        }
    }
}

/// The agreement: the capabilities and limits that the server took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    capabilities: u64,
    max_readahead: u32,
}

impl Agreed {
    fn has(self, capability: u64) -> bool {
        self.capabilities & capability != 0
    }

    /// Whether requests come through io_uring.
    #[must_use]
    pub fn has_ring(self) -> bool {
        self.has(init::OVER_IO_URING)
    }

    /// Flags for the answer to OPENDIR. Before Linux 5.1 the kernel opens each directory by
    /// request, and keeps listings nevertheless.
    ///
    /// # Errors
    /// [`NEVER_AGAIN`].
    pub fn opened_dir_flags(self) -> Answer<u32> {
        if self.has(init::NO_OPENDIR_SUPPORT) {
            return Err(NEVER_AGAIN);
        }
        Ok(fopen::KEEP_CACHE | fopen::CACHE_DIR)
    }

    /// The form of requests from now on.
    #[must_use]
    pub fn form(self) -> Form {
        Form {
            has_setxattr_ext: self.has(init::SETXATTR_EXT),
        }
    }

    /// Flags of a new file that is opened with `flags` of open(2): its close needs no request. A
    /// file that is open only for writing goes past the kernel's pages. No program reads through
    /// it, large requests stay whole, and the kernel does not ask for the capabilities of the file
    /// before its first write.
    ///
    /// With O_DSYNC, which O_SYNC contains, a file goes through the pages: only then the kernel sends
    /// FSYNC behind each write.
    ///
    /// Before Linux 6.6 the kernel keeps the pages of a file when a program writes past them, and
    /// other readers would keep their old contents. DIRECT_IO_ALLOW_MMAP came with the same
    /// changes. Later kernels drop them before the write, and the server has those dropped that are
    /// filled before the write is carried out (`cache/mapped.rs`).
    #[must_use]
    pub fn created_flags(self, flags: u32) -> u32 {
        let access = OFlags::from_bits_retain(flags) & OFlags::RWMODE;
        let (is_write_only, is_synced) = (access == OFlags::WRONLY, flags & abi::O_DSYNC != 0);
        let is_direct = self.has(init::DIRECT_IO_ALLOW_MMAP) && is_write_only && !is_synced;
        let direct = if is_direct { fopen::DIRECT_IO } else { 0 };
        fopen::KEEP_CACHE | fopen::NOFLUSH | direct
    }

    /// The answer to INIT. The kernel's own limits apply where they are lower.
    #[must_use]
    pub fn answer(self) -> abi::InitOut {
        let [low, high] = [self.capabilities, self.capabilities >> 32]
            .map(|bits| u32::try_from(bits & u64::from(u32::MAX)).expect("32 bits"));
        abi::InitOut {
            flags: low,
            flags2: high,
            max_readahead: self.max_readahead,
            max_background: BACKGROUND_MAX,
            // As high as the limit, because the kernel skips files in write-back from this number
            // on.
            congestion_threshold: BACKGROUND_MAX,
            max_write: WRITE_BYTES_MAX,
            time_gran: 1,
            max_pages: max_pages(rustix::param::page_size()),
            ..version_only()
        }
    }
}

/// Pages of one request: no READ asks for more than an answer has room for.
fn max_pages(page_bytes: usize) -> u16 {
    let pages = WRITE_BYTES_MAX as usize / page_bytes;
    u16::try_from(pages).expect("a page has 4 KiB or more")
}

/// The answer to an INIT of a later protocol.
#[must_use]
pub fn version_only() -> abi::InitOut {
    abi::InitOut {
        major: abi::VERSION.0,
        minor: abi::VERSION.1,
        ..abi::InitOut::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(capabilities: u64) -> Offer {
        let init = abi::InitIn {
            major: 7,
            minor: 45,
            max_readahead: 128 << 10,
            flags: u32::try_from(capabilities & 0xffff_ffff).unwrap(),
            flags2: u32::try_from(capabilities >> 32).unwrap(),
            ..abi::InitIn::default()
        };
        match Version::of(init) {
            Version::Ours(offer) => offer,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn capability_that_is_not_offered_is_not_taken() {
        let all = offer(u64::MAX);
        assert!(
            all.take(true, true).has_ring() && !all.take(true, true).has(init::READDIRPLUS_AUTO)
        );
        assert!(!all.take(false, false).has_ring());
        assert_eq!(all.take(true, true).opened_dir_flags(), Err(NEVER_AGAIN));
        assert!(!all.take(true, true).has(init::WRITEBACK_CACHE));
        let is_idmapped = [true, false].map(|sees| all.take(true, sees).has(init::ALLOW_IDMAP));
        assert_eq!(is_idmapped, [true, false]);
        assert!(all.take(true, true).form().has_setxattr_ext);
        let old = offer(init::MAX_PAGES);
        assert_eq!(old.take(true, true).answer().flags, 1 << 22);
        assert_eq!(old.take(true, true).answer().flags2, 0);
        assert!(old.take(true, true).opened_dir_flags().is_ok());
        let without_ext = offer(init::OVER_IO_URING);
        assert!(
            !without_ext.take(true, true).has_ring(),
            "the field is not valid"
        );
    }

    #[test]
    fn limits_are_answered() {
        let answer = offer(u64::MAX).take(false, false).answer();
        assert_eq!((answer.major, answer.minor), (7, 45));
        assert_eq!(answer.max_write, 1 << 20);
        let page_bytes = rustix::param::page_size();
        assert_eq!(usize::from(answer.max_pages) * page_bytes, 1 << 20);
        assert_eq!([4 << 10, 16 << 10, 64 << 10].map(max_pages), [256, 64, 16]);
        assert_eq!(
            (answer.max_background, answer.congestion_threshold),
            (BACKGROUND_MAX, BACKGROUND_MAX)
        );
        assert_eq!((answer.max_readahead, answer.time_gran), (128 << 10, 1));
    }

    #[test]
    fn other_versions_are_told_apart() {
        let of = |major, minor| {
            Version::of(abi::InitIn {
                major,
                minor,
                ..abi::InitIn::default()
            })
        };
        assert_eq!(of(8, 0), Version::Later);
        assert_eq!(of(7, 22), Version::TooOld);
        assert_eq!(of(6, 99), Version::TooOld);
        assert!(
            matches!(of(7, 99), Version::Ours(_)),
            "a later minor one has ours"
        );
    }

    #[test]
    fn only_a_file_that_is_written_alone_goes_past_pages_and_only_if_the_kernel_drops_them() {
        let is_direct = |flags: OFlags, capabilities| {
            offer(capabilities)
                .take(false, false)
                .created_flags(flags.bits())
                & fopen::DIRECT_IO
                != 0
        };
        let writes = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND;
        assert!(is_direct(writes, u64::MAX));
        assert!(!is_direct(writes, !init::DIRECT_IO_ALLOW_MMAP));
        assert!(!is_direct(OFlags::RDWR | OFlags::CREATE, u64::MAX));
        assert!(!is_direct(OFlags::RDONLY | OFlags::CREATE, u64::MAX));
        assert!(!is_direct(
            writes | OFlags::from_bits_retain(abi::O_DSYNC),
            u64::MAX
        ));
        assert!(!is_direct(writes | OFlags::SYNC, u64::MAX));
        assert_eq!(created_handle(fopen::KEEP_CACHE), FileHandle(0));
        assert_eq!(created_handle(fopen::DIRECT_IO), DIRECT_HANDLE);
    }
}
