//! A device that is an image file or a block device.
//!
//! Positional I/O goes through the page cache: images on any file system work, and small writes are
//! gathered there. Bulk writes go past it, where the file can do that (`write_behind.rs`), and
//! pages of bytes that a mount keeps itself are dropped from it. One advisory lock per open
//! (`flock`: exclusive to write, shared to read) keeps two mounts of one volume apart. A block
//! device is opened with `O_EXCL` as well, which also keeps it apart from a mount of another file
//! system. An opener that writes locks all devices and files below as well (`stack.rs`).

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, RwLock};
use rustix::fs::{Advice, FallocateFlags, FlockOperation, IFlags, OFlags};
use rustix::io::Errno;
use thiserror::Error;

use crate::BLOCK_BYTES;
use crate::device::{Device, WriteCheck};
use crate::fsync_errors::Fsync;
use crate::readahead::{Readahead, STEP};
use crate::stack::{self, Refusal};
use crate::superblock::AREA_END;
use crate::write_behind::{Aligned, WriteBehind, path_of};

/// Unit of the space of a file in stat(2), in bytes.
const STAT_BLOCK_BYTES: u64 = 512;

/// The magic number of btrfs in statfs(2).
const BTRFS: u64 = 0x9123_683e;

/// Bytes that the kernel reads ahead by default.
const ASK_BYTES: u64 = 128 << 10;

/// The use that a [`FileDevice`] is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reading and writing, by nobody else at the same time.
    ReadWrite,
    /// Reading, possibly together with other readers.
    ReadOnly,
}

/// Why an image or block device could not be opened.
#[derive(Debug, Error)]
pub enum OpenError {
    /// Nothing is there.
    #[error("{}: no such file or device", .0.display())]
    NotFound(PathBuf),
    /// The path exists and must not be replaced.
    #[error("{}: already exists", .0.display())]
    Exists(PathBuf),
    /// The caller may not open it.
    #[error("{}: permission denied", .0.display())]
    Permission(PathBuf),
    /// It is open elsewhere, or something that shares its bytes is.
    #[error("{}: in use {by}", path.display())]
    Busy {
        /// The path that was to be opened.
        path: PathBuf,
        /// Its user, in words: "by process 7 (ramet)", "through /dev/loop0".
        by: String,
        /// The process that has it open, if that can be seen and nothing lies in between.
        process: Option<u32>,
    },
    /// It is neither a regular file nor a block device.
    #[error("{}: neither a regular file nor a block device", .0.display())]
    NotADevice(PathBuf),
    /// An image must be a multiple of 4096 bytes.
    #[error("a size of {0} bytes is not a multiple of 4096")]
    Unaligned(u64),
    /// Anything else.
    #[error("{}: {source}", path.display())]
    Io {
        /// The path that was opened.
        path: PathBuf,
        /// The answer of the system.
        source: io::Error,
    },
}

fn open_error(path: &Path, source: io::Error) -> OpenError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::NotFound => OpenError::NotFound(path),
        io::ErrorKind::AlreadyExists => OpenError::Exists(path),
        io::ErrorKind::PermissionDenied => OpenError::Permission(path),
        io::ErrorKind::IsADirectory => OpenError::NotADevice(path),
        _ => OpenError::Io { path, source },
    }
}

/// A block device that another opener has for itself.
fn claimed(path: &Path) -> OpenError {
    let holder = File::open(path).map(|node| stack::user_of(&node));
    let (by, process) = holder.unwrap_or_else(|_| ("by another process".into(), None));
    OpenError::Busy {
        path: path.to_owned(),
        by,
        process,
    }
}

/// An image file or a block device, locked while it is open.
pub struct FileDevice {
    file: File,
    fsync: Fsync,
    /// Devices and files below, locked.
    _below: Vec<File>,
    len_bytes: AtomicU64,
    access: Access,
    is_block: bool,
    /// An image file on a host that gives out room beforehand.
    is_sparse: bool,
    /// Made for the first bulk write; `None` when the file takes none.
    write_behind: OnceLock<Option<WriteBehind>>,
    /// Held for reading while the kernel may read ahead.
    reading_ahead: Arc<RwLock<()>>,
    readahead: Mutex<Readahead>,
    /// Most bytes that the kernel takes at a time when it is asked to read ahead; 0 for none.
    ask_bytes: u64,
    /// The same file, opened for the first read that the kernel must not go beyond.
    exact: OnceLock<File>,
    /// Reads under way.
    reads: AtomicUsize,
    /// The same file, opened past the page cache for single blocks; `None` where that is not
    /// possible.
    direct: OnceLock<Option<File>>,
    /// Called before each write that leaves a queue.
    check: OnceLock<WriteCheck>,
}

impl fmt::Debug for FileDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("FileDevice");
        shown.field("file", &self.file).finish_non_exhaustive()
    }
}

impl FileDevice {
    /// Opens and locks the image file or block device at `path`.
    ///
    /// # Errors
    /// [`OpenError`]; `Busy` when another process has it open in a way that excludes `access`.
    pub fn open(path: impl AsRef<Path>, access: Access) -> Result<Self, OpenError> {
        let path = path.as_ref();
        let fail = |source| open_error(path, source);
        // Looked at before it is opened: opening a FIFO or a tape has effects of its own.
        let kind = std::fs::metadata(path).map_err(fail)?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(OpenError::NotADevice(path.to_owned()));
        }
        let mut flags = OFlags::CLOEXEC | OFlags::NONBLOCK;
        if kind.is_block_device() && access == Access::ReadWrite {
            flags |= OFlags::EXCL;
        }
        let file = OpenOptions::new()
            .read(true)
            .write(access == Access::ReadWrite)
            .custom_flags(flags.bits() as i32)
            .open(path)
            .map_err(|source| match source.kind() {
                io::ErrorKind::ResourceBusy => claimed(path),
                _ => fail(source),
            })?;
        let opened = file.metadata().map_err(fail)?.file_type();
        if !opened.is_file() && !opened.is_block_device() {
            return Err(OpenError::NotADevice(path.to_owned()));
        }
        Self::lock(path, file, access)
    }

    fn lock(path: &Path, mut file: File, access: Access) -> Result<Self, OpenError> {
        let fail = |source| open_error(path, source);
        let busy = |(by, process)| OpenError::Busy {
            path: path.to_owned(),
            by,
            process,
        };
        let operation = match access {
            Access::ReadWrite => FlockOperation::NonBlockingLockExclusive,
            Access::ReadOnly => FlockOperation::NonBlockingLockShared,
        };
        match rustix::fs::flock(&file, operation) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Err(busy(stack::user_of(&file))),
            Err(errno) => return Err(fail(errno.into())),
        }
        let below = match access {
            Access::ReadOnly => Vec::new(),
            Access::ReadWrite => stack::lock(&file).map_err(|refusal| match refusal {
                Refusal::InUse(by) => busy((by, None)),
                Refusal::Io(source) => fail(source),
            })?,
        };
        // `metadata().len()` is 0 for a block device; the end of the file is right for both.
        let len_bytes = file.seek(SeekFrom::End(0)).map_err(fail)?;
        let is_sparse = access == Access::ReadWrite && gives_room(&file).map_err(fail)?;
        let found = file.metadata().map_err(fail)?;
        let ask_bytes = ask_bytes(&file).min(STEP);
        Ok(Self {
            fsync: Fsync::new(&file).map_err(fail)?,
            file,
            _below: below,
            len_bytes: AtomicU64::new(len_bytes),
            access,
            is_block: found.file_type().is_block_device(),
            is_sparse,
            write_behind: OnceLock::new(),
            reading_ahead: Arc::default(),
            readahead: Mutex::default(),
            ask_bytes,
            exact: OnceLock::new(),
            reads: AtomicUsize::new(0),
            direct: OnceLock::new(),
            check: OnceLock::new(),
        })
    }

    /// The use that it was opened for.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Makes an image `size_bytes` long, of which only the superblock area keeps its bytes, for a
    /// volume that is made over another one. Durable on return.
    ///
    /// # Errors
    /// `InvalidInput` when the device is no image file, or the size no multiple of 4096; else the
    /// answer of the system.
    pub fn resize_anew(&self, size_bytes: u64) -> io::Result<()> {
        if !self.file.metadata()?.is_file() || !size_bytes.is_multiple_of(BLOCK_BYTES) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.file.set_len(AREA_END.min(size_bytes))?;
        self.file.set_len(size_bytes)?;
        self.file.sync_all()?;
        self.len_bytes.store(size_bytes, Ordering::Release);
        Ok(())
    }

    /// Waits for bulk writes of the range.
    fn settle(&self, addr: u64, len: u64) {
        if let Some(Some(writer)) = self.write_behind.get() {
            writer.settle(addr, len);
        }
    }

    /// Asks the kernel for the ranges before and ahead of a read. Best effort: a read of these
    /// ranges follows in any case, and tells its own error.
    fn ask_ahead(&self, read: Range<u64>, is_shared: bool) {
        // With a read-ahead of 0 the owner of the machine wants none.
        if self.ask_bytes == 0 {
            return;
        }
        let mut readahead = self.readahead.lock();
        let Some(ahead) = readahead.note(&read, is_shared, self.len_bytes()) else {
            return;
        };
        // While others read, the lock is held until the kernel has been asked: so the device gets
        // the requests of all in order.
        let _order = (is_shared && ahead.is_ordered).then_some(readahead);
        let mut range = ahead.range;
        while !range.is_empty() {
            // The kernel takes no more at a time than one request of the device.
            let len = self.ask_bytes.min(range.end - range.start);
            self.ask(range.start, len);
            range.start += len;
        }
    }

    fn ask(&self, addr: u64, len: u64) {
        if let Some(len) = NonZeroU64::new(len) {
            let _ = rustix::fs::fadvise(&self.file, addr, Some(len), Advice::WillNeed);
        }
    }

    /// The file, advised to be read at random: the kernel reads the wanted range, page by page.
    fn exact(&self) -> Option<&File> {
        let open = || -> io::Result<File> {
            let file = File::open(path_of(&self.file))?;
            rustix::fs::fadvise(&file, 0, None, Advice::Random)?;
            Ok(file)
        };
        if self.exact.get().is_none() {
            // Without descriptors now, there may be some later.
            let file = open().ok()?;
            return Some(self.exact.get_or_init(|| file));
        }
        self.exact.get()
    }

    /// The file for I/O past the page cache.
    fn direct(&self) -> Option<&File> {
        let open = || {
            OpenOptions::new()
                .read(true)
                .write(self.access == Access::ReadWrite)
                .custom_flags((OFlags::DIRECT | OFlags::CLOEXEC).bits().cast_signed())
                .open(path_of(&self.file))
                .ok()
        };
        self.direct.get_or_init(open).as_ref()
    }

    /// Reads a range of the device, and nothing beyond it, when bulk writes of it are done.
    fn read_exactly(&self, exact: &File, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.settle(addr, buf.len() as u64);
        exact.read_exact_at(buf, addr)
    }

    fn check_range(&self, addr: u64, len: u64, outside: io::ErrorKind) -> io::Result<()> {
        match addr.checked_add(len) {
            Some(end) if end <= self.len_bytes() => Ok(()),
            _ => Err(outside.into()),
        }
    }
}

/// Most bytes that the kernel reads ahead of `file` when it is asked once: a request of the device,
/// or its read-ahead if that is more. The kernel leaves out the rest. 0 when the read-ahead is off.
fn ask_bytes(file: &File) -> u64 {
    let device = file.metadata().map_or(0, |found| {
        let is_device = found.file_type().is_block_device();
        if is_device { found.rdev() } else { found.dev() }
    });
    let limit = |name| stack::queue_limit(device, name);
    ask_limit(limit("read_ahead_kb"), limit("max_sectors_kb"))
}

/// The same for a read-ahead and a longest request, in KiB.
fn ask_limit(ahead: Option<u32>, longest: Option<u32>) -> u64 {
    match (ahead, longest) {
        (Some(0), _) => 0,
        (Some(ahead), Some(longest)) => u64::from(ahead.max(longest)) << 10,
        _ => ASK_BYTES,
    }
}

/// Whether `file` is a regular file on a file system that gives it room before it is written.
/// Nothing of the file changes: a hole is punched behind its end.
fn gives_room(file: &File) -> io::Result<bool> {
    let found = file.metadata()?;
    if !found.is_file() {
        return Ok(false);
    }
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let end = found.len().next_multiple_of(BLOCK_BYTES);
    Ok(rustix::fs::fallocate(file, flags, end, BLOCK_BYTES).is_ok())
}

/// Has btrfs write over the blocks of `file`, which is empty, where they are. Copied blocks would
/// take new room for each write: the room given before would be of no use, and a volume on a full
/// host could not remove anything. Best effort: without it the file is as others are there.
fn write_in_place(file: &File) {
    let is_btrfs = |found: rustix::fs::StatFs| u64::try_from(found.f_type) == Ok(BTRFS);
    if rustix::fs::fstatfs(file).is_ok_and(is_btrfs)
        && let Ok(flags) = rustix::fs::ioctl_getflags(file)
    {
        // A file in a compressed directory is compressed, and btrfs refuses both in one step.
        let plain = flags - IFlags::COMPRESSED;
        if plain != flags {
            let _ = rustix::fs::ioctl_setflags(file, plain);
        }
        let _ = rustix::fs::ioctl_setflags(file, plain | IFlags::NOCOW);
    }
}

/// Creates a sparse image file of `size_bytes` zero bytes, durably, and opens it. It never is open to
/// other users (mode 0600): an image holds the files of every user of a mount, with any modes. No file
/// stays after an error.
///
/// # Errors
/// [`OpenError`]; `Exists`, and `Unaligned` when `size_bytes` is not a multiple of 4096.
pub fn create_image(path: impl AsRef<Path>, size_bytes: u64) -> Result<FileDevice, OpenError> {
    let path = path.as_ref();
    if !size_bytes.is_multiple_of(BLOCK_BYTES) {
        return Err(OpenError::Unaligned(size_bytes));
    }
    let fail = |source| open_error(path, source);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(fail)?;
    make_image(path, file, size_bytes).inspect_err(|_| {
        // The file is new and holds no data.
        let _ = std::fs::remove_file(path);
    })
}

fn make_image(path: &Path, file: File, size_bytes: u64) -> Result<FileDevice, OpenError> {
    let fail = |source| open_error(path, source);
    write_in_place(&file);
    let device = FileDevice::lock(path, file, Access::ReadWrite)?;
    device.resize_anew(size_bytes).map_err(fail)?;
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    File::open(parent)
        .and_then(|directory| directory.sync_all())
        .map_err(fail)?;
    Ok(device)
}

impl Device for FileDevice {
    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Acquire)
    }

    fn grow(&self, len_bytes: u64) -> io::Result<()> {
        let found = self.file.metadata()?;
        if found.is_file() {
            // Never shorter: another one may have made it longer still, and not synced that.
            if found.len() < len_bytes {
                self.file.set_len(len_bytes)?;
            }
            self.fsync.run(File::sync_all)?;
        } else {
            // The end of a block device may have moved since it was opened.
            let found = (&self.file).seek(SeekFrom::End(0))?;
            if found < len_bytes {
                let detail = format!("the block device has {found} bytes");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
            }
        }
        self.len_bytes.fetch_max(len_bytes, Ordering::AcqRel);
        Ok(())
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.check_range(addr, buf.len() as u64, io::ErrorKind::UnexpectedEof)?;
        let reading_ahead = self.reading_ahead.read();
        if let Some(Some(writer)) = self.write_behind.get()
            && writer.is_busy()
            && let Some(exact) = self.exact()
        {
            drop(reading_ahead);
            return self.read_exactly(exact, addr, buf);
        }
        let others = self.reads.fetch_add(1, Ordering::Relaxed);
        self.ask_ahead(addr..addr + buf.len() as u64, others > 0);
        let done = self.file.read_exact_at(buf, addr);
        self.reads.fetch_sub(1, Ordering::Relaxed);
        done
    }

    fn read_alone_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        let Some(exact) = self.exact() else {
            return self.read_at(addr, buf);
        };
        self.check_range(addr, buf.len() as u64, io::ErrorKind::UnexpectedEof)?;
        self.read_exactly(exact, addr, buf)
    }

    fn read_fresh(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.check_range(addr, buf.len() as u64, io::ErrorKind::UnexpectedEof)?;
        self.settle(addr, buf.len() as u64);
        let mut bytes = Aligned::default();
        bytes.fill(buf);
        let direct = self.direct();
        match direct.map(|direct| direct.read_exact_at(bytes.as_mut_slice(), addr)) {
            Some(Err(error)) if Errno::from_io_error(&error) != Some(Errno::INVAL) => {
                return Err(error);
            }
            Some(Ok(())) => {}
            // The file system of the image has no such I/O: then no other machine shares it by its
            // blocks.
            Some(Err(_)) | None => {
                self.forget_read(addr, buf.len() as u64);
                self.file.read_exact_at(bytes.as_mut_slice(), addr)?;
            }
        }
        buf.copy_from_slice(bytes.as_slice());
        Ok(())
    }

    fn expect_read(&self, addr: u64, len_bytes: u64) {
        // Bulk writes go past the pages that this would fill.
        let _reading_ahead = self.reading_ahead.read();
        if !matches!(self.write_behind.get(), Some(Some(writer)) if writer.is_busy()) {
            self.ask(addr, len_bytes);
        }
    }

    fn forget_read(&self, addr: u64, len_bytes: u64) {
        if let Some(len) = NonZeroU64::new(len_bytes) {
            // Pages that are not on the device yet stay.
            let _ = rustix::fs::fadvise(&self.file, addr, Some(len), Advice::DontNeed);
        }
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        // Without the check, a write beyond the end would silently grow an image file.
        self.check_range(addr, buf.len() as u64, io::ErrorKind::InvalidInput)?;
        let reading_ahead = self.reading_ahead.read();
        if let Some(Some(writer)) = self.write_behind.get() {
            drop(reading_ahead);
            return writer.write_cached(addr, buf);
        }
        // The first bulk write waits until this is done.
        self.file.write_all_at(buf, addr)
    }

    fn write_bulk(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.check_range(addr, buf.len() as u64, io::ErrorKind::InvalidInput)?;
        let start = || {
            let check = self.check.get().cloned();
            WriteBehind::new(&self.file, self.reading_ahead.clone(), check).ok()
        };
        // While it writes, reads go through that file.
        let writer = self.exact().map(|_| self.write_behind.get_or_init(start));
        match writer {
            Some(Some(writer)) => writer.write(addr, buf),
            _ => self.file.write_all_at(buf, addr),
        }
    }

    fn write_through(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.check_range(addr, buf.len() as u64, io::ErrorKind::InvalidInput)?;
        let mut bytes = Aligned::default();
        bytes.fill(buf);
        let direct = self.direct();
        match direct.map(|direct| direct.write_all_at(bytes.as_slice(), addr)) {
            Some(Err(error)) if Errno::from_io_error(&error) == Some(Errno::INVAL) => {}
            Some(done) => return done,
            None => {}
        }
        // By a description of its own, so that no error of writing back is taken from another sync.
        let file = OpenOptions::new().write(true).open(path_of(&self.file))?;
        file.write_all_at(buf, addr)?;
        file.sync_data()
    }

    fn check_late_writes(&self, check: WriteCheck) {
        // The first one stays: there is one user of a device.
        let _ = self.check.set(check);
    }

    fn sync(&self) -> io::Result<()> {
        if let Some(Some(writer)) = self.write_behind.get() {
            writer.drain()?;
        }
        self.fsync.run(File::sync_data)
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.check_range(addr, len_bytes, io::ErrorKind::InvalidInput)?;
        if len_bytes == 0 {
            return Ok(());
        }
        self.settle(addr, len_bytes);
        let done = if self.is_block {
            ramet_sys::discard_blocks(&self.file, addr, len_bytes)
        } else {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&self.file, flags, addr, len_bytes).map_err(Into::into)
        };
        match done.as_ref().err().and_then(Errno::from_io_error) {
            // A hint: where it is not possible now, the space simply stays allocated.
            Some(
                Errno::OPNOTSUPP
                | Errno::NOSYS
                | Errno::NODEV
                | Errno::NOTTY
                | Errno::BUSY
                | Errno::INTR,
            ) => Ok(()),
            _ => done,
        }
    }

    fn is_sparse(&self) -> bool {
        self.is_sparse
    }

    fn host_free_bytes(&self) -> io::Result<u64> {
        if !self.is_sparse {
            return Ok(u64::MAX);
        }
        let host = rustix::fs::fstatvfs(&self.file)?;
        Ok(host.f_bavail.saturating_mul(host.f_frsize))
    }

    fn host_allocated_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.blocks() * STAT_BLOCK_BYTES)
    }

    fn allocate(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.check_range(addr, len_bytes, io::ErrorKind::InvalidInput)?;
        if !self.is_sparse || len_bytes == 0 {
            return Ok(());
        }
        loop {
            match rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, addr, len_bytes) {
                Err(Errno::INTR) => {}
                // Nothing can be promised there; a write is told when it fails.
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(()),
                other => return other.map_err(Into::into),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_sparse_and_keeps_its_writes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let device = create_image(&path, 64 << 20).unwrap();
        assert_eq!(device.len_bytes(), 64 << 20);
        device.write_at(1 << 20, &[7; 65536]).unwrap();
        device.sync().unwrap();
        assert!(std::fs::metadata(&path).unwrap().blocks() * 512 < 1 << 20);
        drop(device);
        let device = FileDevice::open(&path, Access::ReadOnly).unwrap();
        let mut got = [0; 65536];
        device.read_at(1 << 20, &mut got).unwrap();
        assert_eq!(got, [7; 65536]);
    }

    #[test]
    fn an_image_that_the_file_system_cannot_hold_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        assert!(create_image(&path, 1 << 63).is_err());
        assert!(!path.exists());
        create_image(&path, 64 << 20).unwrap();
        assert!(create_image(&path, 64 << 20).is_err());
        assert!(path.exists());
    }

    #[test]
    fn kernel_is_asked_for_no_more_than_it_takes_and_for_nothing_without_a_read_ahead() {
        assert_eq!(ask_limit(Some(0), Some(1280)), 0);
        assert_eq!(ask_limit(Some(128), Some(64)), 128 << 10);
        assert_eq!(ask_limit(Some(128), Some(256)), 256 << 10);
        assert_eq!(ask_limit(None, None), ASK_BYTES);
    }

    #[test]
    fn streams_that_are_read_ahead_see_writes_of_the_meantime() {
        const PART: usize = 8 << 10;
        const PARTS: u64 = 256;
        let dir = tempfile::tempdir().unwrap();
        let device = create_image(dir.path().join("image"), 16 << 20).unwrap();
        let addr = |stream: u64, at: u64| (stream * PARTS + at) * PART as u64;
        for round in 1..=4u8 {
            // Odd parts only when the stream has come near, by way of the cache and past it.
            let write = |stream: u64, at: u64| {
                let bytes = [round.wrapping_mul(at as u8 | 1); PART];
                match at % 4 {
                    1 => device.write_bulk(addr(stream, at), &bytes).unwrap(),
                    _ => device.write_at(addr(stream, at), &bytes).unwrap(),
                }
            };
            (0..4 * PARTS)
                .step_by(2)
                .for_each(|n| write(n / PARTS, n % PARTS));
            std::thread::scope(|scope| {
                for stream in 0..4 {
                    let device = &device;
                    scope.spawn(move || {
                        for at in 0..PARTS {
                            if at % 2 == 0 {
                                write(stream, at + 1);
                            }
                            let mut got = [0; PART];
                            device.read_at(addr(stream, at), &mut got).unwrap();
                            assert_eq!(got, [round.wrapping_mul(at as u8 | 1); PART]);
                        }
                    });
                }
            });
        }
        device.sync().unwrap();
    }

    #[test]
    fn a_forgotten_range_can_be_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let device = create_image(dir.path().join("image"), 1 << 20).unwrap();
        let read = || {
            let mut buf = vec![0; 1 << 16];
            device.read_at(1 << 16, &mut buf).unwrap();
            device.forget_read(1 << 16, 1 << 16);
            buf
        };
        // Nothing of it is on the device yet.
        for byte in [3, 4] {
            device.write_at(1 << 16, &[byte; 1 << 16]).unwrap();
            assert_eq!(read(), [byte; 1 << 16]);
            assert_eq!(read(), [byte; 1 << 16]);
        }
        device.forget_read(0, 0);
    }

    #[test]
    fn discard_gives_the_space_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let device = create_image(&path, 8 << 20).unwrap();
        device.write_at(0, &vec![1; 4 << 20]).unwrap();
        device.sync().unwrap();
        let before = std::fs::metadata(&path).unwrap().blocks();
        device.discard(0, 4 << 20).unwrap();
        assert!(std::fs::metadata(&path).unwrap().blocks() < before);
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 8 << 20);
    }

    #[test]
    fn allocated_room_is_taken_from_the_host_until_it_is_discarded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let device = create_image(&path, 64 << 20).unwrap();
        assert!(device.is_sparse());
        assert!(device.host_free_bytes().unwrap() < u64::MAX);
        device.write_at(1 << 20, &[7; 4096]).unwrap();
        device.allocate(0, 8 << 20).unwrap();
        let taken = || std::fs::metadata(&path).unwrap().blocks() * 512;
        assert!((8 << 20..9 << 20).contains(&taken()), "{}", taken());
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 64 << 20);
        let mut got = [0; 4096];
        device.read_at(1 << 20, &mut got).unwrap();
        assert_eq!(got, [7; 4096]);
        device.discard(0, 8 << 20).unwrap();
        assert!(taken() < 1 << 20);
        let outside = device.allocate(60 << 20, 8 << 20).unwrap_err();
        assert_eq!(outside.kind(), io::ErrorKind::InvalidInput);
        drop(device);
        let device = FileDevice::open(&path, Access::ReadOnly).unwrap();
        assert!(!device.is_sparse());
    }

    #[test]
    fn a_writer_excludes_everybody_and_readers_share() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let writer = create_image(&path, 1 << 20).unwrap();
        for access in [Access::ReadOnly, Access::ReadWrite] {
            assert!(matches!(
                FileDevice::open(&path, access),
                Err(OpenError::Busy { .. })
            ));
        }
        drop(writer);
        let _one = FileDevice::open(&path, Access::ReadOnly).unwrap();
        let _two = FileDevice::open(&path, Access::ReadOnly).unwrap();
        assert!(matches!(
            FileDevice::open(&path, Access::ReadWrite),
            Err(OpenError::Busy { .. })
        ));
    }

    #[test]
    fn an_image_is_made_once_and_resized_anew_when_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let device = create_image(&path, 1 << 20).unwrap();
        for addr in [0, AREA_END] {
            device.write_at(addr, &[1; 4096]).unwrap();
        }
        assert!(matches!(
            create_image(&path, 1 << 20),
            Err(OpenError::Exists(_))
        ));
        device.resize_anew(2 << 20).unwrap();
        assert_eq!(device.len_bytes(), 2 << 20);
        for (addr, byte) in [(0, 1), (AREA_END, 0)] {
            let mut got = [9; 4096];
            device.read_at(addr, &mut got).unwrap();
            assert_eq!(got, [byte; 4096]);
        }
        assert!(device.resize_anew(4097).is_err());
    }

    #[test]
    fn files_that_cannot_be_volumes_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing");
        assert!(matches!(
            FileDevice::open(&missing, Access::ReadWrite),
            Err(OpenError::NotFound(path)) if path == missing
        ));
        assert!(matches!(
            FileDevice::open(dir.path(), Access::ReadOnly),
            Err(OpenError::NotADevice(_))
        ));
        assert!(matches!(
            FileDevice::open("/dev/null", Access::ReadOnly),
            Err(OpenError::NotADevice(_))
        ));
        assert!(matches!(
            create_image(missing, 4097),
            Err(OpenError::Unaligned(4097))
        ));
    }

    #[test]
    fn io_outside_of_the_device_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let device = create_image(&path, 8192).unwrap();
        let mut buf = [0; 4096];
        for addr in [4097, 8192, u64::MAX] {
            let read = device.read_at(addr, &mut buf).unwrap_err();
            assert_eq!(read.kind(), io::ErrorKind::UnexpectedEof);
            let write = device.write_at(addr, &buf).unwrap_err();
            assert_eq!(write.kind(), io::ErrorKind::InvalidInput);
        }
        // Somebody cuts the image while it is open.
        File::options()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(4096)
            .unwrap();
        let read = device.read_at(4096, &mut buf).unwrap_err();
        assert_eq!(read.kind(), io::ErrorKind::UnexpectedEof);
    }
}
