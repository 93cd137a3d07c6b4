//! A directory of a mount, as the place of received trees.
//!
//! Objects are made by calls of the system, below a directory that only the caller may enter: the
//! stage. Each path is walked from there, name by name, and no symbolic link is followed. Clones,
//! forks and removals of trees are calls of the daemon.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use ramet_fs::control::{CLONE, CloneRequest, NameRequest, REMOVE};
use ramet_fs::{
    Caller, Capabilities, Destination, ForkRequest, Found, Kind, NewObject, ReceivedTree,
    SentAttributes, SentFlags, ToldFork, path_of_text, split_path,
};
use rustix::fs::{
    AtFlags, CWD, Dev, Dir, FallocateFlags, FileType, FlockOperation, Gid, IFlags, Mode, OFlags,
    RenameFlags, Stat, Timespec, Timestamps, Uid, XattrFlags, chmod, chownat, fallocate, fchmod,
    flock, fstat, ftruncate, ioctl_getflags, ioctl_setflags, linkat, lremovexattr, lsetxattr,
    makedev, mkdirat, mknodat, open, openat, renameat_with, statat, symlinkat, utimensat,
};
use rustix::io::Errno;

use crate::beneath;
use crate::control::{Root, is_dir, mounted, refuse_if_mounted_on, refuse_if_read_only};
use crate::failure::Outcome;
use crate::import::rights::Rights;
use crate::import::sink::caller_of;
use crate::past::Located;

const LISTS: [&str; 2] = ["system.posix_acl_access", "system.posix_acl_default"];
const FLAGS: IFlags = IFlags::NOATIME.union(IFlags::NODUMP);

/// An open directory of the stage.
struct Opened {
    path: Vec<u8>,
    dir: OwnedFd,
    /// Its new objects have lists or flags of it.
    gives: bool,
    /// The mode that it has again when it is not needed any more: its owner may not use it.
    mode: Option<Mode>,
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(mode) = self.mode {
            // In the stage, a mode that stays too wide ends with the attributes of the directory, or
            // with the stage.
            let _ = fchmod(&self.dir, mode);
        }
    }
}

/// See the module.
pub struct OnMount {
    /// The directory of the trees.
    root: Root,
    /// The top of the mount, below which forks are looked for.
    top: Root,
    caller: Caller,
    /// No mode keeps the caller out.
    may_all: bool,
    stage: Option<(String, OwnedFd)>,
    /// The directory that was used last.
    last: Option<Opened>,
    /// The file that was written last.
    file: Option<(Vec<u8>, File)>,
}

fn split(path: &[u8]) -> (&[u8], &OsStr) {
    let (dir, name) = split_path(path);
    (dir, OsStr::from_bytes(name))
}

/// The path of a name in an open directory, for calls that take no directory.
fn by_proc(dir: &OwnedFd, name: &OsStr) -> CString {
    let prefix = format!("/proc/self/fd/{}/", dir.as_raw_fd());
    let path = [prefix.as_bytes(), name.as_bytes()].concat();
    CString::new(path).expect("names have no NUL")
}

fn readable(dir: impl AsFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(dir, name, flags, Mode::empty())
}

fn status(dir: &OwnedFd, name: &OsStr) -> rustix::io::Result<Stat> {
    statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)
}

/// An object of one of these kinds, held without being opened: to open a device may change it.
fn held(dir: impl AsFd, name: &OsStr, kinds: &[FileType]) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let object = openat(dir, name, flags, Mode::empty())?;
    match kinds.contains(&FileType::from_raw_mode(fstat(&object)?.st_mode)) {
        true => Ok(object),
        false => Err(Errno::INVAL),
    }
}

/// A directory of the stage, opened. Where its owner may not read, change and search it, it may as
/// long as the answer lives. With `may_all` no mode keeps the caller out.
fn usable(dir: impl AsFd, name: &OsStr, may_all: bool) -> rustix::io::Result<Opened> {
    let (path, gives) = (Vec::new(), true);
    if may_all {
        let (dir, mode) = (readable(&dir, name)?, None);
        return Ok(Opened {
            path,
            dir,
            gives,
            mode,
        });
    }
    let object = held(&dir, name, &[FileType::Directory])?;
    let before = Mode::from_raw_mode(fstat(&object)?.st_mode);
    let set = |mode| chmod(path_of_held(&object), mode);
    let mode = (!before.contains(Mode::RWXU)).then_some(before);
    if mode.is_some() {
        set(before | Mode::RWXU)?;
    }
    let opened = open_held(&object, OFlags::RDONLY | OFlags::DIRECTORY);
    match (opened, mode) {
        (Err(error), Some(mode)) => set(mode).and(Err(error)),
        (opened, mode) => Ok(Opened {
            path,
            dir: opened?,
            gives,
            mode,
        }),
    }
}

/// The mode of a directory.
fn mode_of(dir: &OwnedFd, name: &OsStr) -> rustix::io::Result<Mode> {
    Ok(Mode::from_raw_mode(status(dir, name)?.st_mode))
}

fn path_of_held(object: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", object.as_raw_fd())
}

fn open_held(object: &OwnedFd, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    open(path_of_held(object), flags | OFlags::CLOEXEC, Mode::empty())
}

impl OnMount {
    /// The directory `dir` of a mount.
    ///
    /// # Errors
    /// It is none, or takes no changes.
    pub fn open(dir: &Path) -> Outcome<OnMount> {
        let root = Root::open_tree(dir)?;
        root.stats_json().map_err(|e| mounted(dir, e))?;
        refuse_if_read_only(&root, dir)?;
        let caller = caller_of(Rights::of_process());
        Ok(OnMount {
            root,
            top: Located::find(dir)?.root,
            may_all: caller.capabilities.have(Capabilities::DAC_OVERRIDE),
            caller,
            stage: None,
            last: None,
            file: None,
        })
    }

    fn stage(&self) -> rustix::io::Result<&OwnedFd> {
        self.stage
            .as_ref()
            .map(|(_, stage)| stage)
            .ok_or(Errno::STALE)
    }

    /// The directory at `path` in the stage.
    fn dir(&mut self, path: &[u8]) -> rustix::io::Result<&Opened> {
        let is_open = self.last.as_ref().is_some_and(|last| last.path == path);
        if !is_open {
            let below = |last: &Opened| -> Option<usize> {
                let rest = path.strip_prefix(&last.path[..])?;
                rest.starts_with(b"/").then_some(last.path.len() + 1)
            };
            let (last, may_all) = (self.last.take(), self.may_all);
            let (mut at, from) = match last.as_ref().and_then(|last| Some((last, below(last)?))) {
                Some((last, from)) => (usable(&last.dir, OsStr::new("."), may_all)?, from),
                None => (usable(self.stage()?, OsStr::new("."), may_all)?, 0),
            };
            let names = path[from..].split(|&byte| byte == b'/');
            for name in names.filter(|name| !name.is_empty()) {
                at = usable(&at.dir, OsStr::from_bytes(name), may_all)?;
            }
            at.gives = gives(&at.dir);
            at.path = path.to_vec();
            self.last = Some(at);
        }
        self.last.as_ref().ok_or(Errno::STALE)
    }

    /// Runs `work` on an object that its owner may not read or write, as if it might.
    fn open_up<T>(
        &mut self,
        path: &[u8],
        work: impl Fn(&OwnedFd, &OsStr) -> rustix::io::Result<T>,
    ) -> io::Result<T> {
        let (dir, name) = split(path);
        let dir = &self.dir(dir)?.dir;
        match work(dir, name) {
            Err(Errno::ACCESS) => {
                let object = held(dir, name, &[FileType::RegularFile, FileType::Directory])?;
                let mode = Mode::from_raw_mode(fstat(&object)?.st_mode);
                chmod(path_of_held(&object), mode | Mode::RUSR | Mode::WUSR)?;
                let done = work(dir, name);
                chmod(path_of_held(&object), mode)?;
                Ok(done?)
            }
            done => Ok(done?),
        }
    }

    /// Runs `work` on the directory and the name of `path`.
    fn change<T>(
        &mut self,
        path: &[u8],
        work: impl Fn(&OwnedFd, &OsStr) -> rustix::io::Result<T>,
    ) -> io::Result<T> {
        let (dir, name) = split(path);
        Ok(work(&self.dir(dir)?.dir, name)?)
    }

    /// The file at `path`, for writing.
    fn file(&mut self, path: &[u8]) -> io::Result<&File> {
        let is_open = self.file.as_ref().is_some_and(|(at, _)| at == path);
        if !is_open {
            let (dir, name) = split(path);
            let dir = &self.dir(dir)?.dir;
            let object = held(dir, name, &[FileType::RegularFile])?;
            let opened = match open_held(&object, OFlags::WRONLY) {
                // The owner of a file that may not be written: its attributes come at the end.
                Err(Errno::ACCESS) => {
                    chmod(path_of_held(&object), Mode::RUSR | Mode::WUSR)?;
                    open_held(&object, OFlags::WRONLY)
                }
                opened => opened,
            };
            self.file = Some((path.to_vec(), File::from(opened?)));
        }
        let file = self.file.as_ref().map(|(_, file)| file);
        file.ok_or_else(|| Errno::STALE.into())
    }

    /// Forgets open objects: names lead to others now.
    fn forget(&mut self) {
        (self.last, self.file) = (None, None);
    }

    fn token(&mut self, path: &[u8]) -> io::Result<u64> {
        let (dir, name) = split(path);
        let dir = self.dir(dir)?.dir.try_clone()?;
        Ok(Root(dir).source(name)?.token)
    }

    /// The forks with bases that the caller made.
    fn own_forks(&self) -> rustix::io::Result<Vec<ToldFork>> {
        let (mut forks, mut after) = (Vec::new(), None);
        loop {
            let reply = self.top.ask_forks(&ForkRequest::List { after })?;
            let all = reply.forks.into_iter();
            forks.extend(all.filter(|fork| fork.has_base && fork.is_maker));
            after = reply.next;
            if after.is_none() {
                return Ok(forks);
            }
        }
    }

    /// A token of a tree that was received, wherever it is now. `NotFound` if it is gone.
    fn fork_token(&self, of: &ReceivedTree) -> rustix::io::Result<u64> {
        let forks = self.own_forks()?;
        let mut same = forks.iter().filter(|fork| fork.id == of.fork);
        let fork = same.find(|fork| (fork.ino, fork.generation) == of.top);
        let path = path_of_text(&fork.ok_or(Errno::NOENT)?.path).map_err(|_| Errno::PROTO)?;
        let dir_at = |path: &[u8]| beneath::dir_at(&self.top.0, OsStr::from_bytes(path)).map(Root);
        let itself = dir_at(&path).and_then(|fork| fork.source(OsStr::new(".")));
        let found = match (itself, split(&path)) {
            // The modes are those that the tree was sent with.
            (Err(Errno::ACCESS), (b"", name)) => self.top.source(name),
            (Err(Errno::ACCESS), (above, name)) => dir_at(above).and_then(|dir| dir.source(name)),
            (itself, _) => itself,
        }?;
        match found.ino == of.top.0 {
            true => Ok(found.token),
            false => Err(Errno::NOENT),
        }
    }

    /// Renames directories that their owner may not write: then the kernel moves none to another
    /// directory. They have their modes again afterwards.
    fn rename_closed(
        &self,
        path: &[u8],
        name: &OsStr,
        flags: RenameFlags,
    ) -> rustix::io::Result<()> {
        let staged = OsStr::from_bytes(path);
        let mut tops = vec![held(self.stage()?, staged, &[FileType::Directory])?];
        if flags == RenameFlags::EXCHANGE {
            tops.push(held(&self.root.0, name, &[FileType::Directory])?);
        }
        let mut modes = Vec::new();
        for top in &tops {
            modes.push(Mode::from_raw_mode(fstat(top)?.st_mode));
        }
        let set = |top: &OwnedFd, mode: Mode| chmod(path_of_held(top), mode);
        let opened = tops.iter().zip(&modes);
        let opened = opened.map(|(top, mode)| set(top, *mode | Mode::WUSR));
        let renamed = opened.collect::<rustix::io::Result<Vec<()>>>();
        let renamed = renamed.and_then(|_| self.rename(path, name, flags));
        for (top, mode) in tops.iter().zip(modes) {
            set(top, mode)?;
        }
        renamed
    }

    fn rename(&self, path: &[u8], name: &OsStr, flags: RenameFlags) -> rustix::io::Result<()> {
        let (root, stage, name_in_stage) = (&self.root.0, self.stage()?, OsStr::from_bytes(path));
        // The kernel tells of an exchange as of two moves. That of the first name, which goes, is told
        // first.
        match flags == RenameFlags::EXCHANGE {
            true => renameat_with(root, name, stage, name_in_stage, flags),
            false => renameat_with(stage, name_in_stage, root, name, flags),
        }
    }
}

/// Whether the new objects of a directory have lists or flags of it. A directory that does not tell
/// may have them.
fn gives(dir: &OwnedFd) -> bool {
    let has_list = rustix::fs::fgetxattr(dir, LISTS[1], &mut [0u8; 0]) != Err(Errno::NODATA);
    let has_flags = ioctl_getflags(dir).map_or(true, |flags| flags.intersects(FLAGS));
    has_list || has_flags
}

fn found(stat: &Stat) -> rustix::io::Result<Found> {
    Ok(Found {
        number: stat.st_ino,
        kind: Kind::from_mode(stat.st_mode).ok_or(Errno::INVAL)?,
    })
}

fn is_link(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Symlink
}

/// Drops lists and flags that a new object has from its directory.
fn drop_inherited(dir: &OwnedFd, name: &OsStr, object: NewObject<'_>) -> rustix::io::Result<()> {
    if matches!(object, NewObject::Symlink(_)) {
        return Ok(());
    }
    for list in LISTS {
        match lremovexattr(by_proc(dir, name), list) {
            Err(Errno::NODATA | Errno::ACCESS) => {}
            removed => removed?,
        }
    }
    match object {
        NewObject::File(_) | NewObject::Directory => put_flags(dir, name, IFlags::empty()),
        NewObject::Symlink(_) | NewObject::Special(..) => Ok(()),
    }
}

fn put_flags(dir: &OwnedFd, name: &OsStr, wanted: IFlags) -> rustix::io::Result<()> {
    let held = held(dir, name, &[FileType::RegularFile, FileType::Directory])?;
    let object = open_held(&held, OFlags::RDONLY)?;
    let now = ioctl_getflags(&object)?;
    let next = now.difference(FLAGS).union(wanted);
    match now == next {
        true => Ok(()),
        false => ioctl_setflags(&object, next),
    }
}

fn make(dir: &OwnedFd, name: &OsStr, object: NewObject<'_>) -> rustix::io::Result<Option<File>> {
    let (private, flags) = (Mode::RUSR | Mode::WUSR, OFlags::CLOEXEC | OFlags::NOFOLLOW);
    match object {
        NewObject::Directory => mkdirat(dir, name, Mode::RWXU)?,
        NewObject::File(bytes) => {
            let flags = flags | OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY;
            let file = openat(dir, name, flags, private)?;
            if bytes > 0 {
                ftruncate(&file, bytes)?;
            }
            return Ok(Some(File::from(file)));
        }
        NewObject::Symlink(target) => symlinkat(OsStr::from_bytes(target), dir, name)?,
        NewObject::Special(kind, device) => {
            let kind = match kind {
                Kind::Fifo => FileType::Fifo,
                Kind::Socket => FileType::Socket,
                Kind::CharDevice => FileType::CharacterDevice,
                Kind::BlockDevice => FileType::BlockDevice,
                Kind::Regular | Kind::Directory | Kind::Symlink => return Err(Errno::INVAL),
            };
            mknodat(dir, name, kind, private, device_of(device))?;
        }
    }
    Ok(None)
}

/// The number of a device as the system takes it.
fn device_of(device: u32) -> Dev {
    let (major, minor) = (device >> 8 & 0xfff, device & 0xff | device >> 12 & !0xff);
    makedev(major, minor)
}

impl Destination for OnMount {
    fn open_stage(&mut self, name: &str, makes: bool) -> io::Result<bool> {
        self.forget();
        self.stage = None;
        if makes {
            mkdirat(&self.root.0, name, Mode::RWXU)?;
        }
        let stage = match readable(&self.root.0, OsStr::new(name)) {
            Err(Errno::NOENT) => return Ok(false),
            stage => stage?,
        };
        if fstat(&stage)?.st_uid != self.caller.uid {
            return Err(Errno::EXIST.into());
        }
        flock(&stage, FlockOperation::NonBlockingLockExclusive).map_err(|_| {
            let why = "another command receives this stream here at the moment";
            io::Error::new(io::ErrorKind::ResourceBusy, why)
        })?;
        fchmod(&stage, Mode::RWXU)?;
        for list in LISTS {
            match rustix::fs::fremovexattr(&stage, list) {
                Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
                removed => removed?,
            }
        }
        put_flags(&stage, OsStr::new("."), IFlags::empty())?;
        self.stage = Some((name.to_owned(), stage));
        Ok(true)
    }

    fn drop_stage(&mut self) -> io::Result<()> {
        self.forget();
        match self.stage.take() {
            Some((name, _)) => Ok(self.root.remove(OsStr::new(&name))?),
            None => Ok(()),
        }
    }

    fn staged_names(&mut self) -> io::Result<Vec<Vec<u8>>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(self.stage()?)? {
            let name = entry?.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn stages(&mut self, prefix: &str) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.root.0)? {
            let name = entry?.file_name().to_owned();
            names.extend(name.into_string().ok());
        }
        names.retain(|name| name.starts_with(prefix));
        Ok(names)
    }

    fn make(&mut self, path: &[u8], object: NewObject<'_>) -> io::Result<()> {
        let made = self.change(path, |dir, name| make(dir, name, object))?;
        let (dir, name) = split(path);
        let opened = self.dir(dir)?;
        if opened.gives {
            drop_inherited(&opened.dir, name, object)?;
        }
        if let Some(file) = made {
            self.file = Some((path.to_vec(), file));
        }
        Ok(())
    }

    fn status(&mut self, path: &[u8]) -> io::Result<Found> {
        let (dir, name) = split(path);
        Ok(found(&status(&self.dir(dir)?.dir, name)?)?)
    }

    fn link(&mut self, path: &[u8], first: &[u8]) -> io::Result<()> {
        let (from, first) = split(first);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let first = openat(&self.dir(from)?.dir, first, flags, Mode::empty())?;
        self.change(path, |dir, name| {
            linkat(
                CWD,
                path_of_held(&first),
                dir,
                name,
                AtFlags::SYMLINK_FOLLOW,
            )
        })
    }

    fn copy(&mut self, path: &[u8], from: &[u8]) -> io::Result<()> {
        self.file = None;
        let source = self.token(from)?;
        self.change(path, |dir, name| {
            let request = CloneRequest {
                flags: 0,
                source,
                name: name.as_bytes().to_vec(),
            };
            let mut bytes = request.encode().map_err(|_| Errno::NAMETOOLONG)?;
            Root::call_on(dir, CLONE, &mut bytes)
        })
    }

    fn remove(&mut self, path: &[u8]) -> io::Result<()> {
        self.file = None;
        let done = self.change(path, |dir, name| {
            let name = name.as_bytes().to_vec();
            let mut bytes = NameRequest { name }
                .encode()
                .map_err(|_| Errno::NAMETOOLONG)?;
            Root::call_on(dir, REMOVE, &mut bytes)
        });
        self.forget();
        done
    }

    fn write(&mut self, path: &[u8], offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file(path)?.write_all_at(bytes, offset)
    }

    fn read(&mut self, path: &[u8], max: u64) -> io::Result<Vec<u8>> {
        let (dir, name) = split(path);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(openat(&self.dir(dir)?.dir, name, flags, Mode::empty())?);
        let len = file.metadata()?.len().min(max);
        let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
        file.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    }

    fn punch(&mut self, path: &[u8], offset: u64, len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(self.file(path)?, mode, offset, len)?)
    }

    fn resize(&mut self, path: &[u8], bytes: u64) -> io::Result<()> {
        Ok(ftruncate(self.file(path)?, bytes)?)
    }

    fn set_attributes(&mut self, path: &[u8], attributes: &SentAttributes) -> io::Result<()> {
        self.file = None;
        let (dir, name) = split(path);
        let owner = (attributes.uid, attributes.gid);
        let (perm, (uid, gid)) = self.caller.given(attributes.perm, owner);
        let dir = &self.dir(dir)?.dir;
        let stat = status(dir, name)?;
        let nofollow = AtFlags::SYMLINK_NOFOLLOW;
        if (stat.st_uid, stat.st_gid) != (uid, gid) {
            let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
            chownat(dir, name, Some(uid), Some(gid), nofollow)?;
        }
        if !is_link(&stat) {
            chmod(by_proc(dir, name), Mode::from_raw_mode(perm))?;
        }
        let time = |time: ramet_fs::Time| Timespec {
            tv_sec: time.secs,
            tv_nsec: time.nanos.into(),
        };
        let times = Timestamps {
            last_access: time(attributes.atime),
            last_modification: time(attributes.mtime),
        };
        Ok(utimensat(dir, name, &times, nofollow)?)
    }

    fn set_flags(&mut self, path: &[u8], flags: SentFlags) -> io::Result<()> {
        let mut wanted = IFlags::empty();
        wanted.set(IFlags::NOATIME, flags.no_atime);
        wanted.set(IFlags::NODUMP, flags.no_dump);
        self.open_up(path, |dir, name| put_flags(dir, name, wanted))
    }

    fn set_xattr(&mut self, path: &[u8], name: &[u8], value: &[u8]) -> io::Result<bool> {
        let (dir, of) = split(path);
        let dir = &self.dir(dir)?.dir;
        let kind = Kind::from_mode(status(dir, of)?.st_mode);
        if !kind.is_some_and(|kind| self.caller.may_set_xattr(name, kind)) {
            return Ok(false);
        }
        let name = OsStr::from_bytes(name);
        self.open_up(path, |dir, of| {
            lsetxattr(by_proc(dir, of), name, value, XattrFlags::empty())
        })?;
        Ok(true)
    }

    fn remove_xattr(&mut self, path: &[u8], name: &[u8]) -> io::Result<()> {
        let name = OsStr::from_bytes(name);
        self.open_up(path, |dir, of| match lremovexattr(by_proc(dir, of), name) {
            Err(Errno::NODATA | Errno::PERM) => Ok(()),
            removed => removed,
        })
    }

    fn received(&mut self) -> io::Result<Vec<ReceivedTree>> {
        let received = |fork: &ToldFork| {
            let origin = path_of_text(fork.origin_path_then.as_ref()?).ok()?;
            let numbers = (fork.id, (fork.ino, fork.generation));
            ReceivedTree::of(numbers, &fork.note, &origin)
        };
        Ok(self.own_forks()?.iter().filter_map(received).collect())
    }

    fn copy_base(&mut self, path: &[u8], of: &ReceivedTree) -> io::Result<()> {
        let fork = self.fork_token(of)?;
        self.change(path, |dir, name| {
            let request = ForkRequest::CopyBase {
                fork,
                id: of.fork,
                name: name.as_bytes().to_vec(),
            };
            let dir = Root(dir.try_clone().map_err(|_| Errno::MFILE)?);
            dir.ask_forks(&request).map(drop)
        })
    }

    fn fork(&mut self, path: &[u8], from: &[u8], note: &str) -> io::Result<()> {
        self.file = None;
        let source = self.token(from)?;
        self.change(path, |dir, name| {
            let request = ForkRequest::Make {
                source,
                name: name.as_bytes().to_vec(),
                note: note.to_owned(),
                base: true,
            };
            let dir = Root(dir.try_clone().map_err(|_| Errno::MFILE)?);
            dir.ask_forks(&request).map(drop)
        })
    }

    fn look(&mut self, name: &[u8]) -> io::Result<Option<Found>> {
        match status(&self.root.0, OsStr::from_bytes(name)) {
            Err(Errno::NOENT) => Ok(None),
            stat => Ok(Some(found(&stat?)?)),
        }
    }

    fn publish(&mut self, path: &[u8], name: &[u8], exchanges: bool) -> io::Result<()> {
        self.forget();
        let name = OsStr::from_bytes(name);
        let flags = match exchanges {
            true => RenameFlags::EXCHANGE,
            false => RenameFlags::NOREPLACE,
        };
        if exchanges {
            if !is_dir(&status(&self.root.0, name)?) {
                return Err(Errno::NOTDIR.into());
            }
            let shown = Path::new(name);
            refuse_if_mounted_on(&self.root, name, shown)
                .map_err(|why| io::Error::other(why.to_string()))?;
        }
        match self.rename(path, name, flags) {
            // A directory that its owner may not write does not move.
            Err(Errno::ACCESS) => Ok(self.rename_closed(path, name, flags)?),
            renamed => Ok(renamed?),
        }
    }

    fn settle(&mut self, path: &[u8], name: &[u8]) -> io::Result<()> {
        self.forget();
        let (dir, of) = split(path);
        let mode = mode_of(&self.dir(dir)?.dir, of)?;
        let given = held(
            &self.root.0,
            OsStr::from_bytes(name),
            &[FileType::Directory],
        )?;
        let now = Mode::from_raw_mode(fstat(&given)?.st_mode);
        if now != mode && now == mode | Mode::WUSR {
            chmod(path_of_held(&given), mode)?;
        }
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.forget();
        Ok(self.root.sync()?)
    }
}
