//! `ramet swap` and `ramet mv`: renames.

use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::fs::{RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::args::{Swap, Transfer};
use crate::control::{
    self, Root, Seen, Target, mounted, refuse_if_mounted_on, refuse_if_read_only,
};
use crate::copy;
use crate::failure::{Failure, Outcome};
use crate::output::complain;
use crate::resolve::{self, Entry};
use crate::settled::state;

/// An entry that is there, and its open directory.
struct Found<'a> {
    path: &'a Path,
    seen: Seen,
    root: Root,
}

impl<'a> Found<'a> {
    fn at(path: &'a Path) -> Outcome<Found<'a>> {
        let seen = Seen::at(path)?;
        let seen = match seen.entry {
            // A slash, which ends the path of a directory, is left out.
            None => {
                let named = Seen::of_entry(resolve::entry(path)?, path)?;
                if !named.is(&seen.stat) {
                    // The name is that of a link to the directory.
                    return Err(Failure::system(path, Errno::NOTDIR));
                }
                named
            }
            Some(_) => seen,
        };
        let dir = resolve::readable(&entry_of(&seen).dir);
        let root = Root(dir.map_err(|e| Failure::system(path, e))?);
        Ok(Found { path, seen, root })
    }

    /// Refuses a read-only mount and a mount point: the kernel does not tell the daemon of them.
    fn check(&self) -> Outcome {
        refuse_if_read_only(&self.root, self.path)?;
        refuse_if_mounted_on(&self.root, &entry_of(&self.seen).name, self.path)
    }
}

fn entry_of(seen: &Seen) -> &Entry {
    seen.entry.as_ref().expect("made of an entry")
}

/// Exchanges two entries.
pub fn swap(args: &Swap) -> Outcome {
    let (a, b) = (Found::at(&args.a)?, Found::at(&args.b)?);
    for found in [&a, &b] {
        let is_ramet = found.root.stats_json();
        is_ramet.map_err(|e| mounted(found.path, e))?;
    }
    if a.seen.stat.st_dev != b.seen.stat.st_dev {
        return Err(Failure::at(b.path, "must be on the same Ramet mount"));
    }
    if a.seen.is(&b.seen.stat) {
        return Err(Failure::at(b.path, "is the same file"));
    }
    a.check()?;
    b.check()?;
    let names = (&entry_of(&a.seen).name, &entry_of(&b.seen).name);
    let exchange = RenameFlags::EXCHANGE;
    renameat_with(&a.root.0, names.0, &b.root.0, names.1, exchange).map_err(|e| match e {
        Errno::INVAL => Failure::at(b.path, "one of the two lies within the other"),
        e => mounted(b.path, e),
    })
}

/// Moves each source, and goes on after one that cannot be moved.
pub fn run(args: &Transfer) -> Outcome<u8> {
    copy::for_each(args, |src, target| move_one(src, target, args.replace))
}

fn move_one(src: &Path, target: &Target, is_replacing: bool) -> Outcome {
    let source = Found::at(src)?;
    let is_ramet = target.root.stats_json();
    is_ramet.map_err(|e| mounted(&target.path, e))?;
    source.check()?;
    if source.seen.is_entry(target) {
        return Err(Failure::at(&target.path, control::SAME));
    }
    if target.is_on_mount_of(&source.seen)? {
        refuse_if_read_only(&target.root, &target.path)?;
        let from = (&source.root, entry_of(&source.seen).name.as_os_str());
        return copy::put_in_place(from, &source.seen.stat, target, is_replacing);
    }
    complain(Failure::at(
        src,
        "not on the mount of the destination: its bytes are copied, then it is removed",
    ));
    copy::bring((src, &source.seen), target, is_replacing)?;
    target.root.sync().map_err(|e| mounted(&target.path, e))?;
    remove_source(&source)
}

/// Removes a source that was copied from another file system. A source that is not as it was before
/// the copy stays: the copy may lack the changes.
fn remove_source(source: &Found<'_>) -> Outcome {
    let entry = entry_of(&source.seen);
    let now = source.root.look_at(&entry.name);
    let now = now.map_err(|e| Failure::system(source.path, e))?;
    if !source.seen.is(&now) || state(&now) != state(&source.seen.stat) {
        let why = "changed or replaced while it was copied: it stays beside its copy";
        return Err(Failure::at(source.path, why));
    }
    let dir = format!("/proc/self/fd/{}", source.root.0.as_raw_fd());
    let path = Path::new(&dir).join(&entry.name);
    let removed = if source.seen.is_dir() {
        std::fs::remove_dir_all(path)
    } else {
        std::fs::remove_file(path)
    };
    removed.map_err(|e| Failure::system(source.path, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::Write;
    use std::path::PathBuf;

    #[test]
    fn source_that_changes_while_it_is_copied_stays() {
        type Change = fn(&Path, PathBuf);
        let changes: [(&str, Change); 4] = [
            ("appended", |path, _| {
                let mut file = fs::File::options().append(true).open(path).unwrap();
                file.write_all(b" and more").unwrap();
            }),
            ("written in place", |path, _| {
                fs::write(path, "gone").unwrap();
                let old = std::time::SystemTime::UNIX_EPOCH;
                let file = fs::File::options().write(true).open(path).unwrap();
                file.set_modified(old).unwrap();
            }),
            ("replaced", |path, other| {
                fs::write(&other, "kept").unwrap();
                fs::rename(other, path).unwrap();
            }),
            ("replaced by a tree", |path, other| {
                fs::create_dir(&other).unwrap();
                fs::write(other.join("kept"), "").unwrap();
                fs::remove_file(path).unwrap();
                fs::rename(other, path).unwrap();
            }),
        ];
        let top = tempfile::tempdir().unwrap();
        for (name, change) in changes {
            let path = top.path().join(name);
            fs::write(&path, "kept").unwrap();
            let found = Found::at(&path).unwrap();
            change(&path, top.path().join("other"));
            let refused = remove_source(&found);
            let refused = refused.expect_err(name).to_string();
            assert!(refused.contains("while it was copied"), "{refused}");
            assert!(path.exists(), "{name}");
        }
    }

    #[test]
    fn tree_that_is_replaced_while_it_is_copied_stays() {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        for dir in ["tree", "other", "grown"] {
            fs::create_dir(at(dir)).unwrap();
            fs::write(at(dir).join("file"), "").unwrap();
        }
        let (tree, grown) = (at("tree"), at("grown"));
        let (tree, grown) = (Found::at(&tree).unwrap(), Found::at(&grown).unwrap());
        fs::rename(at("tree"), at("moved")).unwrap();
        fs::rename(at("other"), at("tree")).unwrap();
        fs::write(at("grown/new"), "").unwrap();
        for found in [&tree, &grown] {
            assert!(remove_source(found).is_err(), "{}", found.path.display());
        }
        assert!(at("tree/file").exists() && at("grown/new").exists());
    }

    #[test]
    fn slash_behind_a_link_to_a_directory_is_refused() {
        let top = tempfile::tempdir().unwrap();
        let at = |name: &str| top.path().join(name);
        fs::create_dir(at("dir")).unwrap();
        std::os::unix::fs::symlink("dir", at("link")).unwrap();
        for path in ["link/", "link//"] {
            let refused = Found::at(&at(path)).err().expect(path).to_string();
            assert!(refused.contains("not a directory"), "{refused}");
        }
        assert!(Found::at(&at("dir/")).unwrap().seen.is_dir());
        let link = at("link");
        assert!(!Found::at(&link).unwrap().seen.is_dir());
    }

    #[test]
    fn source_that_stays_the_same_is_removed() {
        let top = tempfile::tempdir().unwrap();
        let (file, tree) = (top.path().join("file"), top.path().join("tree"));
        fs::write(&file, "").unwrap();
        fs::create_dir(&tree).unwrap();
        fs::write(tree.join("file"), "").unwrap();
        for path in [&file, &tree] {
            remove_source(&Found::at(path).unwrap()).unwrap();
            assert!(!path.exists());
        }
    }
}
