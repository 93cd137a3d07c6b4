//! Files below an open directory, which are never reached through a symbolic link.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Uid, fchmod, fchown,
    linkat, openat, openat2, renameat, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::failure::errno_of;

/// Longest file with a path or a list of paths that is read.
const TEXT_BYTES_MAX: u64 = 64 << 10;

pub type Answer<T = ()> = rustix::io::Result<T>;

/// Opens a file or a directory.
pub fn opened(dir: impl AsFd, path: impl AsRef<Path>, flags: OFlags) -> Answer<OwnedFd> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
    let flags = flags | OFlags::CLOEXEC;
    openat2(dir, path.as_ref(), flags, Mode::empty(), resolve)
}

/// Opens a directory.
pub fn dir_at(dir: impl AsFd, path: impl AsRef<Path>) -> Answer<OwnedFd> {
    opened(dir, path, OFlags::RDONLY | OFlags::DIRECTORY)
}

/// The bytes of a regular file without the line break at its end; none if there is no such file.
pub fn text_at(dir: impl AsFd, path: impl AsRef<Path>) -> Answer<Option<Vec<u8>>> {
    let file = match opened(&dir, &path, OFlags::RDONLY | OFlags::NONBLOCK) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
        file => file?,
    };
    if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::RegularFile {
        return Ok(None);
    }
    let mut text = Vec::new();
    let read = File::from(file).take(TEXT_BYTES_MAX).read_to_end(&mut text);
    read.map_err(errno_of)?;
    while text.last().is_some_and(u8::is_ascii_whitespace) {
        text.pop();
    }
    Ok(Some(text))
}

/// Names in a directory, with the kind that the listing tells.
pub fn names(dir: &OwnedFd) -> Answer<Vec<(OsString, FileType)>> {
    let mut all = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
        if name != "." && name != ".." {
            all.push((name, entry.file_type()));
        }
    }
    Ok(all)
}

/// A hidden name that no other user can foresee.
pub fn hidden_name() -> Answer<OsString> {
    let mut bytes = [0; 16];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(format!(".ramet-{:032x}", u128::from_le_bytes(bytes)).into())
}

/// A file without a name in a directory, with these bytes, and mode and owner of another one.
pub fn unnamed_like(dir: impl AsFd, bytes: &[u8], like: &Stat) -> Answer<File> {
    let flags = OFlags::WRONLY | OFlags::TMPFILE | OFlags::CLOEXEC;
    let mut file = File::from(openat(dir, ".", flags, Mode::from_raw_mode(0o600))?);
    file.write_all(bytes).map_err(errno_of)?;
    let (uid, gid) = (Uid::from_raw(like.st_uid), Gid::from_raw(like.st_gid));
    match fchown(&file, Some(uid), Some(gid)) {
        // An unprivileged user gives no file away.
        Err(Errno::PERM) => {}
        done => done?,
    }
    fchmod(&file, Mode::from_raw_mode(like.st_mode & 0o777))?;
    Ok(file)
}

/// Gives a file without a name its first one.
pub fn name_at(file: &impl AsRawFd, dir: impl AsFd, name: impl rustix::path::Arg) -> Answer {
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    linkat(CWD, unnamed, dir, name, AtFlags::SYMLINK_FOLLOW)
}

/// Writes a regular file anew that is there. The new file is whole before it takes the name, with
/// mode and owner of the old one: a full volume or the end of this process leaves the old one.
pub fn write_at(dir: impl AsFd, path: impl AsRef<Path>, text: &[u8]) -> Answer {
    let path = path.as_ref();
    let name = path.file_name().ok_or(Errno::ISDIR)?;
    let above = path.parent().unwrap_or(Path::new(""));
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let above = opened(dir, Path::new(".").join(above), flags)?;
    let old = statat(&above, name, AtFlags::SYMLINK_NOFOLLOW)?;
    match FileType::from_raw_mode(old.st_mode) {
        FileType::RegularFile => {}
        FileType::Directory => return Err(Errno::ISDIR),
        FileType::Symlink => return Err(Errno::LOOP),
        _ => return Err(Errno::INVAL),
    }
    let file = unnamed_like(&above, text, &old)?;
    let hidden = hidden_name()?;
    name_at(&file, &above, &hidden)?;
    renameat(&above, &hidden, &above, name).inspect_err(|_| {
        // The first error is the one to tell.
        let _ = unlinkat(&above, &hidden, AtFlags::empty());
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

    #[test]
    fn file_that_is_written_anew_is_whole_at_every_moment() {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        fs::write(at("a/b/file"), "old bytes").unwrap();
        fs::set_permissions(at("a/b/file"), fs::Permissions::from_mode(0o640)).unwrap();
        // An unprivileged user gives no file away.
        let _ = chown(at("a/b/file"), Some(1234), Some(1235));
        let owner = |found: fs::Metadata| (found.uid(), found.gid(), found.mode());
        let before = owner(at("a/b/file").metadata().unwrap());
        let mut reader = fs::File::open(at("a/b/file")).unwrap();
        let dir = fs::File::open(top.path()).unwrap();

        write_at(&dir, "a/b/file", b"new").unwrap();
        assert_eq!(fs::read(at("a/b/file")).unwrap(), b"new");
        assert_eq!(owner(at("a/b/file").metadata().unwrap()), before);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "old bytes");
        assert_eq!(fs::read_dir(at("a/b")).unwrap().count(), 1);
    }

    #[test]
    fn only_a_regular_file_that_is_there_is_written_anew() {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        fs::create_dir(at("dir")).unwrap();
        fs::write(at("dir/file"), "kept").unwrap();
        symlink("dir/file", at("link")).unwrap();
        symlink("dir", at("way")).unwrap();
        let dir = fs::File::open(at("")).unwrap();
        for path in ["link", "way/file", "dir", "none", "dir/../dir/none"] {
            assert!(write_at(&dir, path, b"new").is_err(), "{path}");
        }
        assert_eq!(fs::read(at("dir/file")).unwrap(), b"kept");
        assert_eq!(fs::read_dir(top.path()).unwrap().count(), 3);
        assert_eq!(fs::read_dir(at("dir")).unwrap().count(), 1);
    }
}
