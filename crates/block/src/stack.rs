//! Locks on all that lies below a volume: the file behind a loop device, a disk behind a partition,
//! the parts of a mapped device.
//!
//! A lock on an image file does not exclude a loop device over the same file: the device
//! has an inode of its own. So an opener that writes locks the whole stack below the volume, and
//! looks at the loop devices that stand on each floor:
//!
//! ```text
//!  /dev/loop1    opened, O_EXCL                 the volume
//!     │ LOOP_GET_STATUS64: device, inode, offset, limit
//!  /dev/loop0    its bytes locked, not claimed  ── other loop devices over these bytes: not claimed
//!     │
//!  /srv/image    its bytes locked               ── other loop devices over these bytes: not claimed
//! ```
//!
//! Files are told apart by device and inode, never by path: hard links, bind mounts and other mount
//! namespaces lead to one inode. The path in `/sys/block/loopN/loop/backing_file` only finds the
//! file; it counts when it leads to the inode that the driver names. Locks of byte ranges are
//! exclusive where the part of the floor below is known (loop devices, partitions), and shared
//! where it is not (`slaves/` of a mapped device: two logical volumes lie on one disk); both
//! exclude the image as a whole.
//!
//! **Races.** Each opener takes its own lock first, and looks at others second. Of two that meet,
//! at least one sees the other. Both may be refused; they are never both let in.
//!
//! The locks do not reach a backing file that no path of this process leads to and whose holder
//! does not show in `/proc/locks`, nor a file that a file system shows under another inode
//! (overlayfs), nor other machines. The owner blocks do (`owner/mod.rs`).

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ramet_sys::{LoopStatus, RangeLock, lock_range, loop_status, may_lock_range};
use rustix::fs::OFlags;
use rustix::io::Errno;

/// Most floors of a stack. The kernel allows loop devices to be stacked only a few high.
const DEPTH_MAX: usize = 16;
const SECTOR_BYTES: u64 = 512;

/// Numbers that tell an inode from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// Device number of the file system, and inode number there.
    inode: (u64, u64),
    /// Device number, of a block device; else 0.
    rdev: u64,
}

impl Identity {
    fn of(file: &File) -> io::Result<Self> {
        let found = file.metadata()?;
        let is_block = found.file_type().is_block_device();
        Ok(Self {
            inode: (found.dev(), found.ino()),
            rdev: if is_block { found.rdev() } else { 0 },
        })
    }

    fn behind(status: &LoopStatus) -> Self {
        Self {
            inode: (status.device, status.inode),
            rdev: status.rdevice,
        }
    }

    /// Whether both lead to the same bytes: a block device may have several nodes.
    fn is_same(&self, other: &Self) -> bool {
        if self.rdev != 0 {
            self.rdev == other.rdev
        } else {
            self.inode == other.inode
        }
    }
}

/// Reason why a volume is not opened for writing.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The user of the volume, in words that follow "in use".
    InUse(String),
    /// The system refused something.
    Io(io::Error),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Refusal::Io(error)
    }
}

type Checked<T> = Result<T, Refusal>;

/// Locks `file`, which was opened for writing, and all below it, as long as the answer lives.
///
/// # Errors
/// [`Refusal`].
pub(crate) fn lock(file: &File) -> Checked<Vec<File>> {
    let top = Identity::of(file)?;
    let mut stack = Stack::default();
    stack.take(file, &top, &(0..u64::MAX), RangeLock::Exclusive, None)?;
    if top.rdev != 0 {
        stack.own.insert(top.rdev);
        stack.descend(top.rdev, Some(file), 0..u64::MAX, RangeLock::Exclusive)?;
    }
    stack.floors.push((top, 0..u64::MAX));
    for (floor, range) in std::mem::take(&mut stack.floors) {
        if let Some(rdev) = claimed_above(&floor, &range, &stack.own, 0) {
            return Err(Refusal::InUse(through(rdev)));
        }
    }
    Ok(stack.held)
}

/// In words, the process that has the lock of `file`, and its number, as far as this one sees it.
pub(crate) fn user_of(file: &File) -> (String, Option<u32>) {
    let at = Identity::of(file).ok();
    let process = at.and_then(|at| process_with_lock(&at, false));
    let words = process.map_or_else(|| "by another process".into(), named);
    (words, process)
}

#[derive(Default)]
struct Stack {
    held: Vec<File>,
    /// The block devices that lead down from the volume.
    own: BTreeSet<u64>,
    /// Floors that were met, and the bytes of each that the volume may lie on.
    floors: Vec<(Identity, Range<u64>)>,
}

impl Stack {
    /// Locks bytes of one floor. `below` names the device that stands on it.
    fn take(
        &mut self,
        file: &File,
        at: &Identity,
        range: &Range<u64>,
        mode: RangeLock,
        below: Option<&str>,
    ) -> Checked<()> {
        let is_free = match lock_range(file, range, mode) {
            // A file that may only be read can be asked, if not locked.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::BADF) => {
                may_lock_range(file, range, mode)
            }
            done => done,
        };
        // A file system without such locks has the lock of the whole file all the same.
        if is_free.unwrap_or(true) {
            return Ok(());
        }
        let holder = holder_of(at, &self.own);
        Err(Refusal::InUse(match below {
            Some(below) => format!("{holder}, which has what lies behind {below}"),
            None => holder,
        }))
    }

    /// Locks the floors below bytes of the block device `rdev`.
    fn descend(
        &mut self,
        rdev: u64,
        opened: Option<&File>,
        range: Range<u64>,
        mode: RangeLock,
    ) -> Checked<()> {
        if self.own.len() > DEPTH_MAX {
            return Ok(());
        }
        let sys = sys_dir(rdev);
        if sys.join("partition").exists() {
            // The kernel itself keeps a disk and its partitions apart.
            let start = read_number(&sys.join("start")).unwrap_or(0) * SECTOR_BYTES;
            let size =
                read_number(&sys.join("size")).unwrap_or(u64::MAX / SECTOR_BYTES) * SECTOR_BYTES;
            let disk = fs::canonicalize(&sys)
                .ok()
                .and_then(|dir| Some(dir.parent()?.join("dev")));
            let Some(disk) = disk.and_then(|path| read_rdev(&path)) else {
                return Ok(());
            };
            self.own.insert(disk);
            return self.descend(disk, None, part_of(&range, start, size), mode);
        }
        let node = match opened {
            Some(file) => file.try_clone().ok(),
            None => open_device(rdev, OFlags::empty()).ok(),
        };
        if let Some(status) = node.and_then(shows) {
            return self.go_behind(rdev, &status, &range, mode);
        }
        for slave in fs::read_dir(sys.join("slaves"))
            .into_iter()
            .flatten()
            .flatten()
        {
            if let Some(slave) = read_rdev(&slave.path().join("dev"))
                && self.own.insert(slave)
            {
                // The mapped device has claimed it; sysfs does not tell which bytes are mapped.
                self.descend(slave, None, 0..u64::MAX, RangeLock::Shared)?;
            }
        }
        Ok(())
    }

    /// Locks the file behind the loop device `rdev`.
    fn go_behind(
        &mut self,
        rdev: u64,
        status: &LoopStatus,
        range: &Range<u64>,
        mode: RangeLock,
    ) -> Checked<()> {
        let name = name_of(rdev);
        let at = Identity::behind(status);
        let range = shown(status, range);
        match open_backing(rdev, &at) {
            Some(file) => {
                self.take(&file, &at, &range, mode, Some(&name))?;
                self.held.push(file);
            }
            // Reached by no path from here: at least the lock of an image that is open can be seen.
            None => {
                if let Some(holder) = lock_holder(&at, false) {
                    let why = format!("{holder}, which has what lies behind {name}");
                    return Err(Refusal::InUse(why));
                }
            }
        }
        self.floors.push((at, range.clone()));
        if at.rdev == 0 || !self.own.insert(at.rdev) {
            return Ok(());
        }
        if is_claimed(at.rdev) {
            let why = format!("{}, behind {name}", through(at.rdev));
            return Err(Refusal::InUse(why));
        }
        self.descend(at.rdev, None, range, mode)
    }
}

/// The bytes below, of a part that starts at `start` there and is `len` long.
fn part_of(range: &Range<u64>, start: u64, len: u64) -> Range<u64> {
    let end = range.end.min(len);
    start.saturating_add(range.start.min(end))..start.saturating_add(end)
}

/// The bytes of the file behind a loop device that are shown as `range`.
fn shown(status: &LoopStatus, range: &Range<u64>) -> Range<u64> {
    let limit = match status.limit_bytes {
        0 => u64::MAX,
        limit => limit,
    };
    part_of(range, status.offset_bytes, limit)
}

/// A loop device over these bytes, or one over that, which is claimed: opened with `O_EXCL`,
/// mounted, or mapped. Those of `own` do not count.
fn claimed_above(
    at: &Identity,
    range: &Range<u64>,
    own: &BTreeSet<u64>,
    depth: usize,
) -> Option<u64> {
    if depth > DEPTH_MAX {
        return None;
    }
    loop_devices().into_iter().find_map(|(rdev, status)| {
        let above = shown(&status, &(0..u64::MAX));
        let overlaps = above.start < range.end && range.start < above.end;
        if own.contains(&rdev) || !overlaps || !Identity::behind(&status).is_same(at) {
            return None;
        }
        if is_claimed(rdev) {
            return Some(rdev);
        }
        let device = Identity {
            inode: (0, 0),
            rdev,
        };
        claimed_above(&device, &(0..u64::MAX), own, depth + 1)
    })
}

/// The loop devices that show something, as far as this process may ask them.
fn loop_devices() -> Vec<(u64, LoopStatus)> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        let sys = entry.path();
        // It exists while the device shows a file.
        if !sys.join("loop/backing_file").exists() {
            continue;
        }
        let rdev = read_rdev(&sys.join("dev"));
        let status = rdev.and_then(|rdev| shows(open_device(rdev, OFlags::empty()).ok()?));
        found.extend(rdev.zip(status));
    }
    found
}

/// The status of a loop device; `None` for any other device, or when it is not told.
fn shows(node: File) -> Option<LoopStatus> {
    loop_status(node).ok().flatten()
}

/// Whether another opener has the block device for itself.
fn is_claimed(rdev: u64) -> bool {
    let opened = open_device(rdev, OFlags::EXCL);
    opened.is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
}

/// The file behind a loop device, if the path that the kernel tells leads to it.
fn open_backing(rdev: u64, at: &Identity) -> Option<File> {
    let path = fs::read_to_string(sys_dir(rdev).join("loop/backing_file")).ok()?;
    let path = PathBuf::from(path.strip_suffix('\n').unwrap_or(&path));
    let kind = fs::metadata(&path).ok()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return None;
    }
    let open = |write| {
        let flags = (OFlags::CLOEXEC | OFlags::NONBLOCK).bits().cast_signed();
        let mut options = OpenOptions::new();
        options
            .read(true)
            .write(write)
            .custom_flags(flags)
            .open(&path)
    };
    let file = open(true).or_else(|_| open(false)).ok()?;
    Identity::of(&file).ok()?.is_same(at).then_some(file)
}

/// Opens a node of a block device.
fn open_device(rdev: u64, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(name_of(rdev))?;
    if Identity::of(&file)?.rdev == rdev {
        Ok(file)
    } else {
        Err(io::ErrorKind::NotFound.into())
    }
}

/// Path of the node of a block device.
fn name_of(rdev: u64) -> String {
    let uevent = fs::read_to_string(sys_dir(rdev).join("uevent")).unwrap_or_default();
    let name = uevent
        .lines()
        .find_map(|line| line.strip_prefix("DEVNAME="));
    match name {
        Some(name) => format!("/dev/{name}"),
        None => format!("/dev/block/{}", numbers(rdev)),
    }
}

fn numbers(rdev: u64) -> String {
    format!("{}:{}", rustix::fs::major(rdev), rustix::fs::minor(rdev))
}

fn sys_dir(rdev: u64) -> PathBuf {
    Path::new("/sys/dev/block").join(numbers(rdev))
}

/// A limit of the queue of a block device; a partition has the queue of its disk.
pub(crate) fn queue_limit(rdev: u64, name: &str) -> Option<u32> {
    let dir = sys_dir(rdev);
    let queues = [dir.join("queue"), dir.join("../queue")];
    let limit = queues
        .iter()
        .find_map(|queue| read_number(&queue.join(name)));
    limit.and_then(|limit| u32::try_from(limit).ok())
}

fn read_number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn read_rdev(path: &Path) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    let (major, minor) = text.trim().split_once(':')?;
    Some(rustix::fs::makedev(
        major.parse().ok()?,
        minor.parse().ok()?,
    ))
}

/// In words, the user of a file: the process with a lock on it, else a loop device over it that is
/// not one of `own`.
fn holder_of(at: &Identity, own: &BTreeSet<u64>) -> String {
    if let Some(holder) = lock_holder(at, true) {
        return holder;
    }
    let claimed = claimed_above(at, &(0..u64::MAX), own, 0);
    claimed.map_or_else(|| "by another process".into(), through)
}

/// In words, a block device that is claimed, and the process that has a lock on it, if there is
/// one.
fn through(rdev: u64) -> String {
    let name = name_of(rdev);
    let node = open_device(rdev, OFlags::empty());
    let holder = node.and_then(|node| Ok(lock_holder(&Identity::of(&node)?, false)));
    match holder {
        Ok(Some(holder)) => format!("through {name} {holder}"),
        _ => format!("through {name}"),
    }
}

/// The kernel lists locks a page at a time, and by their places: a look that other locks go beside may
/// miss one that stays. So a lock is looked for so many times.
const LOOKS_AT_LOCKS: usize = 8;

/// In words, the process that has a lock on an inode, if this one may see it. With `is_ours` this
/// process has one as well.
fn lock_holder(at: &Identity, is_ours: bool) -> Option<String> {
    process_with_lock(at, is_ours).map(named)
}

fn process_with_lock(at: &Identity, is_ours: bool) -> Option<u32> {
    (0..LOOKS_AT_LOCKS).find_map(|_| {
        // The first read asks for more than the kernel lists at once.
        let mut locks = Vec::with_capacity(64 << 10);
        File::open("/proc/locks")
            .and_then(|mut file| file.read_to_end(&mut locks))
            .ok()?;
        let locks = String::from_utf8_lossy(&locks);
        let mut pids = locks.lines().filter_map(|line| lock_on(line, at.inode));
        pids.find(|pid| !is_ours || *pid != std::process::id())
    })
}

fn named(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    match name.trim() {
        "" => format!("by process {pid}"),
        name => format!("by process {pid} ({name})"),
    }
}

/// The process of a line of `/proc/locks`, if it is of an exclusive lock on this inode.
fn lock_on(line: &str, inode: (u64, u64)) -> Option<u32> {
    let mut words = line.split_whitespace().skip(1);
    // Locks that are waited for have an arrow there.
    let ("FLOCK" | "OFDLCK", _, "WRITE") = (words.next()?, words.next()?, words.next()?) else {
        return None;
    };
    let pid = words.next()?.parse().ok()?;
    let mut place = words.next()?.split(':');
    let mut hex = || u32::from_str_radix(place.next()?, 16).ok();
    let device = rustix::fs::makedev(hex()?, hex()?);
    let number: u64 = place.next()?.parse().ok()?;
    ((device, number) == inode && pid != 0).then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(offset_bytes: u64, limit_bytes: u64) -> LoopStatus {
        LoopStatus {
            offset_bytes,
            limit_bytes,
            ..LoopStatus::default()
        }
    }

    #[test]
    fn the_bytes_below_are_shifted_and_cut() {
        assert_eq!(shown(&status(0, 0), &(0..u64::MAX)), 0..u64::MAX);
        assert_eq!(shown(&status(4096, 0), &(0..u64::MAX)), 4096..u64::MAX);
        assert_eq!(shown(&status(4096, 8192), &(0..u64::MAX)), 4096..12_288);
        assert_eq!(shown(&status(4096, 8192), &(512..1024)), 4608..5120);
        assert_eq!(shown(&status(4096, 8192), &(9000..9999)), 12_288..12_288);
    }

    #[test]
    fn a_line_of_the_locks_names_the_process_of_an_exclusive_lock() {
        let inode = (rustix::fs::makedev(0xfe, 0x12), 77);
        let flock = "1: FLOCK  ADVISORY  WRITE 1234 fe:12:77 0 EOF";
        assert_eq!(lock_on(flock, inode), Some(1234));
        assert_eq!(lock_on(flock, (inode.0, 78)), None);
        for other in [
            "2: FLOCK  ADVISORY  READ 1234 fe:12:77 0 EOF",
            "2: -> FLOCK  ADVISORY  WRITE 1234 fe:12:77 0 EOF",
            "3: POSIX  ADVISORY  WRITE 1234 fe:12:77 0 EOF",
            "4: OFDLCK ADVISORY  WRITE -1 fe:12:77 0 EOF",
            "",
        ] {
            assert_eq!(lock_on(other, inode), None, "{other}");
        }
    }

    #[test]
    fn a_second_opener_is_told_of_the_first() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || OpenOptions::new().read(true).write(true).open(file.path());
        let (first, second) = (open().unwrap(), open().unwrap());
        let held = lock(&first).unwrap();
        assert!(matches!(lock(&second), Err(Refusal::InUse(_))));
        rustix::fs::flock(&first, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
        let (told, process) = user_of(&second);
        assert_eq!(process, Some(std::process::id()));
        assert!(
            told.contains(&format!("by process {}", std::process::id())),
            "{told}"
        );
        drop((held, first));
        lock(&second).unwrap();
    }

    #[test]
    fn a_holder_is_found_while_other_locks_come_and_go() {
        use rustix::fs::{FlockOperation, flock};
        let hold = || {
            let file = tempfile::tempfile().unwrap();
            flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
            file
        };
        // The list of the kernel has these first or last.
        let held = [hold(), hold()];
        let has_ended = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !has_ended.load(std::sync::atomic::Ordering::Relaxed) {
                    drop((0..200).map(|_| hold()).collect::<Vec<_>>());
                }
            });
            let found = (0..500).all(|n| {
                let at = Identity::of(&held[n % 2]).unwrap();
                process_with_lock(&at, false) == Some(std::process::id())
            });
            has_ended.store(true, std::sync::atomic::Ordering::Relaxed);
            assert!(found);
        });
    }
}
