//! Objects of a directory tree, read into frames.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ramet_fs::{
    BLOCK_BYTES, FRAME_BYTES_MAX, FrameWriter, IMPORT_PATH_BYTES_MAX, ITEM_BYTES_MAX, ImportAttr,
    ImportBody, ImportItem, Time, XATTR_BYTES_MAX,
};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, SeekFrom, Stat, fgetxattr, flistxattr, fstat, lgetxattr,
    llistxattr, openat, readlinkat, seek, statat,
};
use rustix::io::{Errno, pread};

use crate::import::report::Report;

/// Longest list of names of extended attributes: a limit of the kernel.
const XATTR_LIST_BYTES: usize = 64 << 10;
/// Least room for contents that is worth filling before a frame goes.
const ROOM_BYTES_MIN: usize = 64 << 10;

/// An object of the source.
pub enum Seen {
    /// A directory, open.
    Directory { dir: Arc<OwnedFd>, path: Vec<u8> },
    /// Any other object.
    Leaf(Leaf),
}

/// A name in an open directory.
pub struct Leaf {
    pub dir: Arc<OwnedFd>,
    pub name: Vec<u8>,
    /// Path below the source.
    pub path: Vec<u8>,
    /// The kind as the directory tells it.
    pub kind: FileType,
}

/// An object that is no directory, with its attributes at the beginning.
pub struct Opened {
    leaf: Leaf,
    /// The file, if it is one.
    file: Option<OwnedFd>,
    stat: Stat,
}

impl Opened {
    /// Opens an object.
    pub fn new(leaf: Leaf) -> Result<Opened, (Leaf, Errno)> {
        match Opened::parts(&leaf) {
            Ok((file, stat)) => Ok(Opened { leaf, file, stat }),
            Err(error) => Err((leaf, error)),
        }
    }

    fn parts(leaf: &Leaf) -> rustix::io::Result<(Option<OwnedFd>, Stat)> {
        if leaf.kind == FileType::RegularFile {
            let file = open_quietly(&leaf.dir, &leaf.name, OFlags::NONBLOCK)?;
            let stat = fstat(&file)?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                return Err(Errno::STALE);
            }
            return Ok((Some(file), stat));
        }
        let stat = statat(&leaf.dir, &leaf.name[..], AtFlags::SYMLINK_NOFOLLOW)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile | FileType::Directory => Err(Errno::STALE),
            _ => Ok((None, stat)),
        }
    }

    /// Device and number, if the object has several names.
    pub fn identity(&self) -> Option<(u64, u64)> {
        (self.stat.st_nlink > 1).then_some((self.stat.st_dev, self.stat.st_ino))
    }

    pub fn path(&self) -> &[u8] {
        &self.leaf.path
    }
}

/// Opens a file or directory to be read, without a change of its access time if that is allowed.
pub fn open_quietly(dir: impl AsFd, name: &[u8], more: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | more;
    match openat(&dir, name, flags | OFlags::NOATIME, Mode::empty()) {
        Err(Errno::PERM) => openat(dir, name, flags, Mode::empty()),
        opened => opened,
    }
}

/// Frames that are filled one after the other. `out` takes each full one, and tells whether it goes
/// on.
pub struct Frames<'a> {
    frame: FrameWriter,
    out: &'a mut dyn FnMut(Vec<u8>) -> bool,
    is_cut: bool,
}

impl<'a> Frames<'a> {
    pub fn new(out: &'a mut dyn FnMut(Vec<u8>) -> bool) -> Self {
        Frames {
            frame: FrameWriter::new(),
            out,
            is_cut: false,
        }
    }

    /// Adds an item that takes up to `bytes` beside its fixed part.
    pub fn put(&mut self, item: &ImportItem<'_>, bytes: usize) {
        if self.frame.len() + bytes + ITEM_BYTES_MAX > FRAME_BYTES_MAX {
            self.flush();
        }
        self.frame.put(item);
    }

    /// Bytes of contents that go into the frame: all that are `wanted`, or whole blocks. A new frame
    /// is begun if they are few.
    pub fn room(&mut self, wanted: u64) -> usize {
        const BLOCK: usize = BLOCK_BYTES as usize;
        let fits = |room: usize| {
            usize::try_from(wanted)
                .ok()
                .filter(|wanted| *wanted <= room)
        };
        if fits(self.frame.room()).is_none() && self.frame.room() < ROOM_BYTES_MIN {
            self.flush();
        }
        let room = self.frame.room();
        fits(room).unwrap_or(room / BLOCK * BLOCK)
    }

    pub fn flush(&mut self) {
        let full = std::mem::take(&mut self.frame);
        if !full.is_empty() && !self.is_cut {
            self.is_cut = !(self.out)(full.finish());
        }
    }

    /// Whether nobody takes the frames any more.
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }
}

/// The attributes in `stat`.
pub fn attr_of(stat: &Stat, has_names: bool) -> ImportAttr {
    let time = |secs: i64, nanos: u64| Time {
        secs,
        nanos: u32::try_from(nanos).unwrap_or_default(),
    };
    ImportAttr {
        mode: stat.st_mode,
        uid: stat.st_uid,
        gid: stat.st_gid,
        atime: time(stat.st_atime, stat.st_atime_nsec),
        mtime: time(stat.st_mtime, stat.st_mtime_nsec),
        has_names,
    }
}

/// Reads objects, on one thread.
pub struct Reader<'a> {
    report: &'a Report,
    /// Devices are left out if the process may not make any.
    makes_devices: bool,
    scratch: Vec<u8>,
    names: Vec<u8>,
    value: Vec<u8>,
}

impl<'a> Reader<'a> {
    pub fn new(report: &'a Report, makes_devices: bool) -> Reader<'a> {
        Reader {
            report,
            makes_devices,
            scratch: vec![0; FRAME_BYTES_MAX],
            names: vec![0; XATTR_LIST_BYTES],
            value: vec![0; XATTR_BYTES_MAX],
        }
    }

    /// Tells of an object that cannot be read.
    pub fn tell_error(&self, path: &[u8], error: Errno) {
        self.report.tell_error(path, error);
    }

    /// Reads a directory itself, without its entries.
    pub fn directory(&mut self, dir: &OwnedFd, path: &[u8], frames: &mut Frames<'_>) {
        let stat = match fstat(dir) {
            Ok(stat) => stat,
            Err(error) => return self.report.tell_error(path, error),
        };
        let item = ImportItem::Object {
            path,
            attr: attr_of(&stat, false),
            body: ImportBody::Directory,
        };
        frames.put(&item, path.len());
        self.xattrs(Of::Open(dir.as_fd()), path, frames);
    }

    /// Reads any other object. With `has_names` its other names may follow. Answers whether it was put.
    pub fn object(&mut self, opened: &Opened, has_names: bool, frames: &mut Frames<'_>) -> bool {
        let (path, stat) = (&opened.leaf.path[..], &opened.stat);
        if path.len() > IMPORT_PATH_BYTES_MAX {
            self.report.tell_error(path, Errno::NAMETOOLONG);
            return false;
        }
        let attr = attr_of(stat, has_names);
        let mut put = |body, bytes: usize| {
            frames.put(&ImportItem::Object { path, attr, body }, path.len() + bytes);
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                let size_bytes = u64::try_from(stat.st_size).unwrap_or_default();
                put(ImportBody::File(size_bytes), 0);
                if let Some(file) = &opened.file {
                    self.xattrs(Of::Open(file.as_fd()), path, frames);
                    self.contents(opened, file, size_bytes, frames);
                }
                return true;
            }
            FileType::Symlink => {
                let target = readlinkat(&opened.leaf.dir, &opened.leaf.name[..], Vec::new());
                match target {
                    Ok(target) => put(
                        ImportBody::Symlink(target.as_bytes()),
                        target.as_bytes().len(),
                    ),
                    Err(error) => {
                        self.report.tell_error(path, error);
                        return false;
                    }
                }
            }
            FileType::CharacterDevice | FileType::BlockDevice if !self.makes_devices => {
                self.report.tell(path, "a device: only root may make one");
                return false;
            }
            _ => put(ImportBody::Special(device_number(stat.st_rdev)), 0),
        }
        let dir = opened.leaf.dir.as_raw_fd();
        let mut link = format!("/proc/self/fd/{dir}/").into_bytes();
        link.extend_from_slice(&opened.leaf.name);
        self.xattrs(Of::Path(&link), path, frames);
        true
    }

    /// Puts the extended attributes of an object.
    fn xattrs(&mut self, of: Of<'_>, path: &[u8], frames: &mut Frames<'_>) {
        let len = match of.list(&mut self.names) {
            Ok(len) => len,
            Err(Errno::OPNOTSUPP) => return,
            Err(error) => return self.report.tell_error(path, error),
        };
        for name in self.names[..len].split(|&byte| byte == 0) {
            if name.is_empty() {
                continue;
            }
            match of.get(name, &mut self.value) {
                Ok(len) => {
                    let value = &self.value[..len];
                    frames.put(&ImportItem::Xattr { name, value }, name.len() + len);
                }
                // It went meanwhile, or only the kernel reads it.
                Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
                Err(error) => self.report.tell_error(path, error),
            }
        }
    }

    /// Puts the contents of a file, without its holes.
    fn contents(
        &mut self,
        opened: &Opened,
        file: &OwnedFd,
        size_bytes: u64,
        frames: &mut Frames<'_>,
    ) {
        let path = &opened.leaf.path;
        let allocated = u64::try_from(opened.stat.st_blocks).unwrap_or_default() * 512;
        let has_holes = allocated < size_bytes;
        let mut at = 0;
        while at < size_bytes && !frames.is_cut() {
            let part = match has_holes {
                true => next_data(file, at, size_bytes),
                false => Ok(Some((at, size_bytes))),
            };
            let done = part.and_then(|part| match part {
                Some((start, end)) => self.part(file, (start, end), size_bytes, frames),
                None => Ok(size_bytes),
            });
            match done {
                Ok(end) => at = end,
                Err(error) => return self.report.tell_error(path, error),
            }
        }
        let unchanged = fstat(file).is_ok_and(|now| {
            let times = |stat: &Stat| (stat.st_mtime, stat.st_mtime_nsec, stat.st_size);
            times(&now) == times(&opened.stat)
        });
        if !unchanged {
            self.report.tell(path, "changed while it was read");
        }
    }

    /// Puts the contents from `at` to `end`. Answers the end of them: the end of the file, if that
    /// came before.
    fn part(
        &mut self,
        file: &OwnedFd,
        (mut at, end): (u64, u64),
        size_bytes: u64,
        frames: &mut Frames<'_>,
    ) -> rustix::io::Result<u64> {
        while at < end && !frames.is_cut() {
            let len = frames.room(end - at);
            let mut filled = 0;
            while filled < len {
                match pread(file, &mut self.scratch[filled..len], at + filled as u64)? {
                    0 => break,
                    more => filled += more,
                }
            }
            let whole = (at + filled as u64)
                .next_multiple_of(BLOCK_BYTES)
                .min(size_bytes)
                - at;
            let whole = usize::try_from(whole).map_or(len, |whole| whole.min(len));
            self.scratch[filled..whole].fill(0);
            if filled == 0 {
                return Ok(size_bytes);
            }
            let bytes = &self.scratch[..whole];
            frames.put(&ImportItem::Data { offset: at, bytes }, whole);
            at += whole as u64;
            if filled < len {
                return Ok(size_bytes);
            }
        }
        Ok(end)
    }
}

/// The object that extended attributes are asked of.
enum Of<'a> {
    Open(BorrowedFd<'a>),
    /// The object itself at a path, and not that of a link there.
    Path(&'a [u8]),
}

impl Of<'_> {
    fn list(&self, names: &mut [u8]) -> rustix::io::Result<usize> {
        match self {
            Of::Open(fd) => flistxattr(fd, names),
            Of::Path(path) => llistxattr(*path, names),
        }
    }

    fn get(&self, name: &[u8], value: &mut [u8]) -> rustix::io::Result<usize> {
        match self {
            Of::Open(fd) => fgetxattr(fd, name, value),
            Of::Path(path) => lgetxattr(*path, name, value),
        }
    }
}

/// The number of a device in the 32 bits of the kernel.
fn device_number(device: u64) -> u32 {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    minor & 0xff | major << 8 | (minor & !0xff) << 12
}

/// The next part of a file with data, in whole blocks; `None` when there is no more.
fn next_data(file: &OwnedFd, at: u64, size_bytes: u64) -> rustix::io::Result<Option<(u64, u64)>> {
    let start = match seek(file, SeekFrom::Data(at)) {
        Ok(start) => start / BLOCK_BYTES * BLOCK_BYTES,
        Err(Errno::NXIO) => return Ok(None),
        // The file system knows no holes.
        Err(Errno::INVAL) => return Ok(Some((at, size_bytes))),
        Err(error) => return Err(error),
    };
    let end = seek(file, SeekFrom::Hole(start.max(at)))?;
    let end = end.next_multiple_of(BLOCK_BYTES).min(size_bytes);
    Ok((start.max(at) < end).then_some((start.max(at), end)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_fill_frames_to_their_end() {
        let mut lens = Vec::new();
        let mut out = |frame: Vec<u8>| {
            lens.push(frame.len());
            true
        };
        let mut frames = Frames::new(&mut out);
        for size in (1..200_000).step_by(777) {
            let mut at = 0;
            while at < size {
                let len = frames.room(size - at);
                assert!(
                    len > 0
                        && (len as u64 == size - at || (len as u64).is_multiple_of(BLOCK_BYTES))
                );
                let bytes = vec![0; len];
                let item = ImportItem::Data {
                    offset: at,
                    bytes: &bytes,
                };
                frames.put(&item, len);
                at += len as u64;
            }
        }
        frames.flush();
        assert!(lens.iter().all(|len| *len <= FRAME_BYTES_MAX), "{lens:?}");
        let few = lens
            .iter()
            .filter(|len| **len < FRAME_BYTES_MAX - (128 << 10));
        assert!(lens.len() > 10 && few.count() <= 1);
    }
}
