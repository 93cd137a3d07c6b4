//! Trees: everything a user can see of one, the differences between two, and a synthetic one.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rand::Rng;
use rand::rngs::StdRng;
use rustix::fs::{FileType, Mode};
use xxhash_rust::xxh3::Xxh3;

/// All that a user can see of one name, without the properties in which copies may differ (inode
/// number, ctime, atime, allocated blocks, size of a directory).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    kind: char,
    mode: u32,
    owner: (u32, u32),
    /// Bytes of a file or a link; 0 for the rest.
    len: u64,
    /// Modification time in seconds and nanoseconds; `None` when the scan ignores times.
    mtime: Option<(i64, i64)>,
    device: u64,
    /// Link count; of directories too, which is 2 + subdirectories on every file system compared.
    links: u64,
    /// First name in scan order of the same inode: equal exactly when the hard-link structure is.
    same_as: PathBuf,
    target: Option<PathBuf>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    content: u64,
}

/// Whether modification times count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Times {
    /// They must be equal to the nanosecond.
    Compare,
    /// They are left out, for trees that were edited separately.
    Ignore,
}

/// Reads a whole tree. Paths are relative to `root`, which itself is the empty path.
pub fn scan(root: &Path, times: Times) -> io::Result<BTreeMap<PathBuf, Entry>> {
    let mut out = BTreeMap::new();
    let mut inodes = HashMap::new();
    let mut pending = vec![PathBuf::new()];
    while let Some(rel) = pending.pop() {
        let path = root.join(&rel);
        let meta = fs::symlink_metadata(&path)?;
        let kind = meta.file_type();
        if kind.is_dir() {
            let mut names = fs::read_dir(&path)?
                .map(|e| e.map(|e| e.file_name()))
                .collect::<io::Result<Vec<_>>>()?;
            // Reverse order on the stack: names come off it sorted, which makes `same_as` the
            // same on every file system.
            names.sort_by(|a, b| b.cmp(a));
            pending.extend(names.into_iter().map(|n| rel.join(n)));
        }
        let same_as = inodes
            .entry((meta.dev(), meta.ino()))
            .or_insert_with(|| rel.clone())
            .clone();
        let entry = Entry {
            kind: match () {
                () if kind.is_dir() => 'd',
                () if kind.is_file() => 'f',
                () if kind.is_symlink() => 'l',
                () if kind.is_fifo() => 'p',
                () if kind.is_socket() => 's',
                () if kind.is_char_device() => 'c',
                () => 'b',
            },
            mode: meta.mode() & 0o7777,
            owner: (meta.uid(), meta.gid()),
            len: if kind.is_file() || kind.is_symlink() {
                meta.len()
            } else {
                0
            },
            mtime: (times == Times::Compare).then(|| (meta.mtime(), meta.mtime_nsec())),
            device: meta.rdev(),
            links: meta.nlink(),
            same_as,
            target: kind
                .is_symlink()
                .then(|| fs::read_link(&path))
                .transpose()?,
            xattrs: xattrs(&path)?,
            content: if kind.is_file() { digest(&path)? } else { 0 },
        };
        out.insert(rel, entry);
    }
    Ok(out)
}

/// Differences between two trees, one line each, at most 20; empty when they are alike.
pub fn differences(left: &Path, right: &Path, times: Times) -> Vec<String> {
    let (a, b) = match (scan(left, times), scan(right, times)) {
        (Ok(a), Ok(b)) => (a, b),
        (a, b) => {
            return [(left, a.err()), (right, b.err())]
                .into_iter()
                .filter_map(|(path, e)| e.map(|e| format!("{}: {e}", path.display())))
                .collect();
        }
    };
    let mut out = Vec::new();
    for (path, x) in &a {
        match b.get(path) {
            Some(y) if x == y => {}
            Some(y) => out.push(format!("{path:?}: {x:?}\n    but: {y:?}")),
            None => out.push(format!("{path:?}: only in {}", left.display())),
        }
    }
    out.extend(
        b.keys()
            .filter(|path| !a.contains_key(*path))
            .map(|path| format!("{path:?}: only in {}", right.display())),
    );
    out.truncate(20);
    out
}

/// Asserts that two trees are alike in everything a user can see.
pub fn assert_same(left: &Path, right: &Path, times: Times) {
    let found = differences(left, right, times);
    assert!(
        found.is_empty(),
        "{} and {} differ:\n{}",
        left.display(),
        right.display(),
        found.join("\n")
    );
}

/// Asserts that every inode number below `root` belongs to one file: a number seen twice must be
/// hard links of each other, so not more often than the link count says, and never a directory.
pub fn assert_inodes_unique(root: &Path) {
    let mut seen: HashMap<u64, (u64, PathBuf)> = HashMap::new();
    let mut pending = vec![root.to_path_buf()];
    while let Some(path) = pending.pop() {
        let meta = fs::symlink_metadata(&path).expect("the tree is quiet");
        if meta.is_dir() {
            for entry in fs::read_dir(&path).expect("the tree is quiet") {
                pending.push(entry.expect("the tree is quiet").path());
            }
        }
        let (count, first) = seen.entry(meta.ino()).or_insert((0, path.clone()));
        *count += 1;
        let allowed = if meta.is_dir() { 1 } else { meta.nlink() };
        assert!(
            *count <= allowed,
            "inode {} is both {} and {}",
            meta.ino(),
            first.display(),
            path.display()
        );
    }
}

/// A file's content as one number.
pub fn digest(path: &Path) -> io::Result<u64> {
    let mut file = File::open(path)?;
    let mut hash = Xxh3::new();
    let mut buffer = vec![0; 256 * 1024];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hash.digest()),
            n => hash.update(&buffer[..n]),
        }
    }
}

/// The attributes copies carry along: `user.*`, and with them POSIX ACLs.
fn xattrs(path: &Path) -> io::Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut names = vec![0u8; 64 * 1024];
    let len = match rustix::fs::llistxattr(path, &mut names[..]) {
        Ok(len) => len,
        Err(rustix::io::Errno::OPNOTSUPP) => 0,
        Err(e) => return Err(e.into()),
    };
    let mut out = BTreeMap::new();
    for name in names[..len].split(|&b| b == 0).filter(|n| !n.is_empty()) {
        if !name.starts_with(b"user.") && !name.starts_with(b"system.posix_acl") {
            continue;
        }
        let mut value = vec![0u8; 64 * 1024];
        let len = rustix::fs::lgetxattr(path, name, &mut value[..])?;
        value.truncate(len);
        out.insert(name.to_vec(), value);
    }
    Ok(out)
}

/// Makes a tree of about `files` files below `root`: nested directories, sizes from nothing to
/// hundreds of KiB, holes, symlinks, hard links, attributes, modes, and names of every kind of
/// byte.
pub fn synthesize(root: &Path, files: usize, rng: &mut StdRng) -> io::Result<()> {
    fs::create_dir_all(root)?;
    let mut dirs = vec![root.to_path_buf()];
    let mut made: Vec<PathBuf> = Vec::new();
    for number in 0..files {
        if rng.random_bool(0.08) {
            let dir = pick(&dirs, rng).join(format!("dir{number}"));
            fs::create_dir(&dir)?;
            dirs.push(dir);
        }
        let path = pick(&dirs, rng).join(name(number, rng));
        match rng.random_range(0..100) {
            0..5 => symlink(format!("../target{number}"), &path)?,
            5..8 if !made.is_empty() => fs::hard_link(pick(&made, rng), &path)?,
            8..9 => rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR, 0)?,
            _ => {
                write_file(&path, rng)?;
                made.push(path);
            }
        }
    }
    Ok(())
}

fn write_file(path: &Path, rng: &mut StdRng) -> io::Result<()> {
    let mut file = File::create(path)?;
    let len = match rng.random_range(0..100) {
        0..5 => 0,
        5..60 => rng.random_range(1..4096),
        60..95 => rng.random_range(4096..40_000),
        _ => rng.random_range(40_000..600_000),
    };
    let mut content = vec![0u8; len];
    rng.fill(&mut content[..]);
    file.write_all(&content)?;
    if rng.random_bool(0.03) {
        // A hole in the middle and one at the end.
        rustix::fs::ftruncate(&file, len as u64 + 300_000)?;
        rustix::io::pwrite(&file, b"after a hole", len as u64 + 100_000)?;
    }
    if rng.random_bool(0.1) {
        file.set_permissions(PermissionsExt::from_mode(rng.random_range(0o400..0o1000)))?;
    }
    if rng.random_bool(0.05) {
        let value = vec![7u8; rng.random_range(0..200)];
        rustix::fs::fsetxattr(
            &file,
            "user.colour",
            &value,
            rustix::fs::XattrFlags::empty(),
        )?;
    }
    Ok(())
}

/// A name that no other `number` gets: usually plain, sometimes long or of bytes that are no text.
fn name(number: usize, rng: &mut StdRng) -> PathBuf {
    let mut bytes = format!("f{number}").into_bytes();
    match rng.random_range(0..40) {
        0 => bytes.resize(255, b'x'),
        1 => bytes.extend([0x01, 0xff, b'\n', b' ', 0x7f]),
        2 => bytes.extend("–ñ漢".as_bytes()),
        _ => {}
    }
    std::ffi::OsString::from_vec(bytes).into()
}

pub(crate) fn pick<'a, T>(from: &'a [T], rng: &mut StdRng) -> &'a T {
    &from[rng.random_range(0..from.len())]
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn a_copy_is_alike_until_one_byte_changes() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        synthesize(&a, 200, &mut StdRng::seed_from_u64(1)).unwrap();
        crate::run_ok("cp", &["-a", a.to_str().unwrap(), b.to_str().unwrap()]);
        assert_same(&a, &b, Times::Compare);
        assert_inodes_unique(&a);
        let (victim, _) = scan(&b, Times::Ignore)
            .unwrap()
            .into_iter()
            .find(|(_, e)| e.kind == 'f' && e.len > 0 && e.links == 1)
            .unwrap();
        let mut content = fs::read(b.join(&victim)).unwrap();
        content[0] ^= 1;
        fs::write(b.join(&victim), content).unwrap();
        assert_eq!(differences(&a, &b, Times::Ignore).len(), 1);
    }
}
