//! Merges of forks, case by case: `docs/merge.md` has the table.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use common::{find, found, make, make_at, names, place, variable, volume};
use ramet_fs::{
    Caller, Clash, CloneMode, Error, Favor, Ino, Kind, LeftOut, MergeOptions, MergeParts, Merged,
    MergedName, NewFork, NewInode, ROOT_INO, RenameMode, SetAttr, SetTime, SetXattr, Time, Volume,
    merge_fork,
};

/// All merges of the table are staged if this variable is set.
const STAGED: &str = "RAMET_STAGED";

fn parts() -> MergeParts {
    match variable(STAGED) {
        None => MergeParts::default(),
        Some(_) => MergeParts {
            steps_max: 0,
            part_bytes: 1,
        },
    }
}

/// A volume with the directory `src` and its fork `fork`.
struct Bed {
    volume: Arc<Volume>,
}

impl Bed {
    /// Fills `src` and forks it.
    fn new(fill: impl FnOnce(&Self)) -> Self {
        let bed = Self { volume: volume().1 };
        make(&bed.volume, ROOT_INO, "src", Kind::Directory);
        fill(&bed);
        let new = NewFork {
            note: "",
            has_base: true,
        };
        let (root, src) = (Caller::root(), bed.at("src"));
        bed.volume
            .trees()
            .fork(&root, src, (ROOT_INO, b"fork"), new)
            .unwrap();
        bed
    }

    fn find(&self, path: &str) -> Option<Ino> {
        found(&self.volume, path)
    }

    fn at(&self, path: &str) -> Ino {
        find(&self.volume, path)
    }

    fn place<'a>(&self, path: &'a str) -> (Ino, &'a [u8]) {
        place(&self.volume, path)
    }

    fn make(&self, path: &str, kind: Kind) -> Ino {
        make_at(&self.volume, path, kind)
    }

    fn dir(&self, path: &str) {
        self.make(path, Kind::Directory);
    }

    /// Makes a symbolic link.
    fn symlink(&self, (dir, name): (&str, &str), target: &[u8]) {
        let mut link = NewInode::new(Kind::Symlink, 0o777);
        link.target = target;
        let (names, dir) = (self.volume.names(), self.at(dir));
        names.create(dir, name.as_bytes(), &link).unwrap();
    }

    /// Makes a file of these bytes, or gives it them.
    fn write(&self, path: &str, bytes: &[u8]) {
        let ino = self
            .find(path)
            .unwrap_or_else(|| self.make(path, Kind::Regular));
        self.set(
            path,
            SetAttr {
                size_bytes: Some(0),
                ..SetAttr::default()
            },
        );
        self.volume.files().write(ino, 0, bytes, None).unwrap();
    }

    fn read(&self, path: &str) -> Vec<u8> {
        self.volume
            .files()
            .read(self.at(path), 0, 1 << 20)
            .unwrap()
            .to_vec()
    }

    fn set(&self, path: &str, set: SetAttr) {
        self.volume
            .attributes()
            .setattr(self.at(path), &set, None)
            .unwrap();
    }

    fn chmod(&self, path: &str, perm: u32) {
        self.set(
            path,
            SetAttr {
                perm: Some(perm),
                ..SetAttr::default()
            },
        );
    }

    fn setxattr(&self, path: &str, name: &str, value: &[u8]) {
        let (attributes, any) = (self.volume.attributes(), SetXattr::Any);
        attributes
            .setxattr(self.at(path), name.as_bytes(), value, any)
            .unwrap();
    }

    fn getxattr(&self, path: &str, name: &str) -> Option<Vec<u8>> {
        let found = self
            .volume
            .attributes()
            .getxattr(self.at(path), name.as_bytes());
        found.ok().map(|value| value.to_vec())
    }

    fn rename(&self, from: &str, to: &str) {
        let (from, to) = (self.place(from), self.place(to));
        self.volume
            .names()
            .rename(from, to, RenameMode::Replace, None)
            .unwrap();
    }

    fn link(&self, from: &str, to: &str) {
        let (dir, name) = self.place(to);
        self.volume.names().link(self.at(from), dir, name).unwrap();
    }

    fn remove(&self, path: &str) {
        let (dir, name) = self.place(path);
        self.volume
            .trees()
            .remove_tree(&Caller::root(), dir, name)
            .unwrap();
    }

    fn try_merge(&self, caller: &Caller, options: &MergeOptions) -> Result<Merged, Error> {
        let both = (self.volume.trees(), self.volume.controls().forks());
        merge_fork(both, caller, (self.at("fork"), self.at("src")), options)
    }

    fn merge_as(&self, favor: Favor) -> Merged {
        let options = MergeOptions {
            favor,
            parts: parts(),
            ..MergeOptions::default()
        };
        let merged = self.try_merge(&Caller::root(), &options).unwrap();
        let is_staged = variable(STAGED).is_some() && !merged.names.is_empty();
        assert_eq!(merged.is_staged, is_staged);
        assert!(self.volume.controls().check().unwrap().is_empty());
        merged
    }

    fn merge(&self) {
        let merged = self.merge_as(Favor::Neither);
        assert!(merged.is_done, "{:?}", merged.conflicts);
    }

    fn merge_of_nothing(&self) {
        let merged = self.merge_as(Favor::Neither);
        assert!(merged.is_done && merged.names.is_empty(), "{merged:?}");
    }

    /// The conflicts of a merge, which changes nothing.
    fn clashes(&self) -> Vec<(String, Clash)> {
        let before = self.listing("src");
        let merged = self.merge_as(Favor::Neither);
        assert!(!merged.is_done);
        assert_eq!(self.listing("src"), before, "nothing is changed");
        let conflicts = merged.conflicts.into_iter();
        let text = |path| String::from_utf8(path).unwrap();
        conflicts.map(|one| (text(one.path), one.clash)).collect()
    }

    fn clash(&self, path: &str, clash: Clash) {
        assert_eq!(self.clashes(), [(path.to_owned(), clash)]);
    }

    /// All paths below a directory, with number and time of each.
    fn listing(&self, path: &str) -> Vec<(String, Ino, Time)> {
        let mut all = Vec::new();
        for name in names(&self.volume, self.at(path)) {
            let path = format!("{path}/{}", String::from_utf8(name).unwrap());
            let attr = self.attr(&path);
            all.push((path.clone(), attr.ino, attr.ctime));
            if attr.kind == Kind::Directory {
                all.extend(self.listing(&path));
            }
        }
        all
    }

    fn attr(&self, path: &str) -> ramet_fs::Attr {
        self.volume.attributes().getattr(self.at(path)).unwrap()
    }
}

const TEXT: &[u8] = b"one\ntwo\nthree\nfour\nfive\nsix\nseven\n";

fn with(from: &str, to: &str) -> Vec<u8> {
    let text = std::str::from_utf8(TEXT).unwrap();
    text.replace(from, to).into_bytes()
}

/// `src/f` is a text.
fn text() -> Bed {
    Bed::new(|bed| bed.write("src/f", TEXT))
}

#[test]
fn text_changed_on_both_sides_is_merged_by_lines() {
    let bed = text();
    bed.write("fork/f", &with("one", "1"));
    bed.write("src/f", &with("seven", "7"));
    let merged = bed.merge_as(Favor::Neither);
    assert_eq!(merged.names, [(b"f".to_vec(), MergedName::Text)]);
    let both = String::from_utf8(with("one", "1")).unwrap();
    assert_eq!(bed.read("src/f"), both.replace("seven", "7").into_bytes());
}

#[test]
fn lines_changed_in_two_ways_are_a_conflict_that_a_side_may_win() {
    let bed = text();
    bed.write("fork/f", &with("four", "4"));
    bed.write("src/f", &with("four", "IV"));
    bed.clash("f", Clash::Contents);
    assert!(bed.merge_as(Favor::Ours).is_done);
    assert_eq!(bed.read("src/f"), with("four", "IV"));
    assert!(bed.merge_as(Favor::Theirs).is_done);
    assert_eq!(bed.read("src/f"), with("four", "4"));
}

#[test]
fn binary_files_are_not_merged_and_large_ones_are_taken() {
    let large = |byte| vec![byte; 300_000];
    let bed = Bed::new(|bed| {
        bed.write("src/binary", b"a\n\0\n\n\nb\n");
        bed.write("src/large", &large(1));
    });
    bed.write("fork/large", &large(2));
    bed.merge();
    assert_eq!(bed.read("src/large"), large(2));
    bed.write("fork/binary", b"c\n\0\n\n\nb\n");
    bed.write("src/binary", b"a\n\0\n\n\nd\n");
    bed.clash("binary", Clash::Contents);
}

#[test]
fn same_changes_on_both_sides_are_no_work() {
    let bed = text();
    for top in ["src", "fork"] {
        bed.write(&format!("{top}/f"), b"new");
        bed.chmod(&format!("{top}/f"), 0o600);
        bed.write(&format!("{top}/added"), b"equal");
    }
    let before = bed.listing("src");
    let merged = bed.merge_as(Favor::Neither);
    assert!(merged.is_done && merged.names.is_empty());
    assert_eq!(bed.listing("src"), before);
}

#[test]
fn each_attribute_is_merged_on_its_own() {
    let bed = text();
    bed.chmod("fork/f", 0o600);
    bed.setxattr("fork/f", "user.a", b"theirs");
    bed.write("src/f", b"ours");
    bed.setxattr("src/f", "user.b", b"ours");
    let uid = Some(7);
    bed.set(
        "src/f",
        SetAttr {
            uid,
            ..SetAttr::default()
        },
    );
    let before = bed.at("src/f");
    bed.merge();
    let attr = bed.attr("src/f");
    assert_eq!((attr.ino, attr.perm, attr.uid), (before, 0o600, 7));
    assert_eq!(bed.read("src/f"), b"ours");
    assert_eq!(bed.getxattr("src/f", "user.a").unwrap(), b"theirs");
    assert_eq!(bed.getxattr("src/f", "user.b").unwrap(), b"ours");
    bed.chmod("src/f", 0o640);
    bed.setxattr("src/f", "user.a", b"ours");
    bed.set(
        "fork/f",
        SetAttr {
            uid: Some(8),
            ..SetAttr::default()
        },
    );
    let attribute = Clash::Attribute(b"user.a".to_vec());
    let f = || "f".to_owned();
    let wanted = [(f(), Clash::Mode), (f(), Clash::Owner), (f(), attribute)];
    assert_eq!(bed.clashes(), wanted);
}

/// A list that lets user 5 read and write.
fn list() -> Vec<u8> {
    let entries: [(u16, u16, u32); 5] = [
        (1, 6, u32::MAX),
        (2, 6, 5),
        (4, 4, u32::MAX),
        (16, 6, u32::MAX),
        (32, 4, u32::MAX),
    ];
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(perm.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

#[test]
fn access_control_lists_come_with_their_mode() {
    const ACL: &str = "system.posix_acl_access";
    let bed = text();
    bed.setxattr("fork/f", ACL, &list());
    bed.write("src/f", b"ours");
    bed.merge();
    assert_eq!(bed.getxattr("src/f", ACL), Some(list()));
    assert_eq!(
        bed.attr("src/f").perm,
        0o664,
        "the mask is the group of the mode"
    );
    bed.chmod("src/f", 0o640);
    bed.chmod("fork/f", 0o600);
    let attribute = Clash::Attribute(ACL.as_bytes().to_vec());
    let f = || "f".to_owned();
    assert_eq!(bed.clashes(), [(f(), Clash::Mode), (f(), attribute)]);
}

#[test]
fn kinds_are_exchanged_only_where_nothing_was_changed() {
    let bed = Bed::new(|bed| {
        bed.write("src/f", TEXT);
        bed.dir("src/d");
        bed.write("src/d/in", b"in");
    });
    bed.remove("fork/f");
    bed.dir("fork/f");
    bed.write("fork/f/new", b"new");
    bed.remove("fork/d");
    bed.symlink(("fork", "d"), b"f/new");
    bed.write("src/f", b"changed");
    bed.clash("f", Clash::Kind);
    bed.write("src/f", TEXT);
    bed.write("src/d/more", b"new inside");
    bed.clash("d", Clash::Kind);
    bed.remove("src/d/more");
    bed.merge();
    assert_eq!(bed.read("src/f/new"), b"new");
    let target = bed.volume.attributes().readlink(bed.at("src/d")).unwrap();
    assert_eq!(&target[..], b"f/new");
}

#[test]
fn an_object_of_another_kind_does_not_take_the_name_that_the_destination_gave_the_old_one() {
    let bed = Bed::new(|bed| {
        bed.dir("src/d");
        bed.write("src/d/x", b"A");
        bed.dir("src/top");
        bed.write("src/top/f", b"A");
        bed.dir("src/to");
    });
    bed.remove("fork/d");
    bed.symlink(("fork", "d"), b"/else");
    bed.rename("src/d", "src/e");
    bed.clash("e", Clash::Kind);
    assert!(bed.merge_as(Favor::Ours).is_done);
    assert_eq!(bed.read("src/e/x"), b"A");
    bed.remove("fork/top/f");
    bed.symlink(("fork/top", "f"), b"/else");
    bed.rename("src/top/f", "src/to/g");
    let conflicts = ["e", "to/g"].map(|path| (path.to_owned(), Clash::Kind));
    assert_eq!(bed.clashes(), conflicts);
    assert!(bed.merge_as(Favor::Theirs).is_done);
    assert_eq!(bed.attr("src/d").kind, Kind::Symlink);
    assert_eq!(bed.attr("src/top/f").kind, Kind::Symlink);
    assert!(bed.find("src/e").is_none() && bed.find("src/to/g").is_none());
}

#[test]
fn devices_and_links_are_merged_as_they_are() {
    let bed = Bed::new(|bed| {
        bed.symlink(("src", "link"), b"old");
    });
    let mut device = NewInode::new(Kind::CharDevice, 0o600);
    device.rdev = 0x103;
    bed.volume
        .names()
        .create(bed.at("fork"), b"null", &device)
        .unwrap();
    for (top, target) in [("fork", &b"theirs"[..]), ("src", b"ours")] {
        bed.remove(&format!("{top}/link"));
        bed.symlink((top, "link"), target);
    }
    bed.clash("link", Clash::Contents);
    assert!(bed.merge_as(Favor::Theirs).is_done);
    let target = bed
        .volume
        .attributes()
        .readlink(bed.at("src/link"))
        .unwrap();
    assert_eq!(&target[..], b"theirs");
    let attr = bed.attr("src/null");
    assert_eq!((attr.kind, attr.rdev), (Kind::CharDevice, 0x103));
}

#[test]
fn renames_meet_edits_of_the_other_side() {
    let bed = Bed::new(|bed| {
        bed.write("src/a", TEXT);
        bed.write("src/b", TEXT);
        bed.dir("src/d");
        bed.write("src/d/in", TEXT);
    });
    bed.rename("fork/a", "fork/d/a2");
    bed.write("fork/d/a2", &with("one", "1"));
    bed.write("src/a", &with("seven", "7"));
    bed.rename("src/b", "src/b2");
    bed.write("fork/b", b"fork's");
    bed.rename("src/d", "src/e");
    bed.write("fork/d/in", b"changed");
    bed.write("fork/d/new", b"new");
    bed.merge();
    let both = String::from_utf8(with("one", "1")).unwrap();
    assert_eq!(
        bed.read("src/e/a2"),
        both.replace("seven", "7").into_bytes()
    );
    assert_eq!(bed.read("src/b2"), b"fork's");
    assert_eq!(bed.read("src/e/in"), b"changed");
    assert_eq!(bed.read("src/e/new"), b"new");
    let gone = ["src/a", "src/b", "src/d"];
    assert!(gone.iter().all(|path| bed.find(path).is_none()));
}

#[test]
fn file_that_the_fork_renames_keeps_its_inode() {
    let bed = Bed::new(|bed| {
        bed.write("src/log", TEXT);
        bed.dir("src/d");
    });
    bed.rename("fork/log", "fork/d/old");
    bed.chmod("fork/d/old", 0o600);
    let open = bed.at("src/log");
    bed.write("src/log", b"more");
    bed.merge();
    assert_eq!(bed.at("src/d/old"), open);
    assert_eq!(bed.attr("src/d/old").perm, 0o600);
    bed.volume.files().write(open, 4, b" lines", None).unwrap();
    assert_eq!(bed.read("src/d/old"), b"more lines");
    assert!(bed.find("src/log").is_none());
}

/// A file that had two names is a shared inode for good.
#[test]
fn file_that_once_had_two_names_keeps_its_contents_when_the_fork_renames_it() {
    let large: Vec<u8> = (0..100 << 10).map(|at: u32| (at >> 4) as u8).collect();
    let bed = Bed::new(|bed| {
        bed.dir("src/d");
        for name in ["src/small", "src/large", "src/ours"] {
            bed.write(name, if name == "src/small" { TEXT } else { &large });
            bed.setxattr(name, "user.note", b"kept");
            if name != "src/ours" {
                bed.link(name, "src/t");
                bed.remove("src/t");
            }
        }
    });
    bed.link("src/ours", "src/d/t");
    bed.remove("src/d/t");
    let before = ["src/small", "src/large", "src/ours"].map(|name| bed.at(name));
    bed.rename("fork/small", "fork/d/small");
    bed.rename("fork/large", "fork/large2");
    bed.rename("fork/ours", "fork/d/ours");
    bed.chmod("fork/large2", 0o600);
    bed.merge();
    let after = ["src/d/small", "src/large2", "src/d/ours"];
    assert_eq!(after.map(|name| bed.at(name)), before);
    for name in after {
        let bytes = if name == "src/d/small" { TEXT } else { &large };
        assert!(bed.read(name) == bytes, "{name}");
        assert_eq!(bed.getxattr(name, "user.note").unwrap(), b"kept");
        assert_eq!(bed.attr(name).nlink, 1);
    }
    assert_eq!(bed.attr("src/large2").perm, 0o600);
    assert_eq!(names(&bed.volume, bed.at("src")), [&b"d"[..], b"large2"]);
    bed.rename("src/large2", "src/large");
    bed.link("src/large", "src/d/large");
    assert!(bed.read("src/d/large") == large);
    assert!(bed.volume.controls().check().unwrap().is_empty());
}

/// The clone root of a shared inode has its contents, so another one gets a copy.
#[test]
fn file_that_once_had_two_names_is_renamed_into_another_clone_root() {
    let large: Vec<u8> = (0..100 << 10).map(|at: u32| (at >> 4) as u8).collect();
    let bed = Bed::new(|bed| {
        bed.dir("src/d");
        let (dir, name) = bed.place("src/root");
        let trees = bed.volume.trees();
        let (root, mode) = (Caller::root(), CloneMode::New);
        trees
            .clone_entry(&root, bed.at("src/d"), dir, name, mode)
            .unwrap();
        bed.write("src/f", &large);
        bed.link("src/f", "src/t");
        bed.remove("src/t");
    });
    bed.setxattr("src/f", "user.note", b"ours");
    bed.rename("fork/f", "fork/root/g");
    bed.chmod("fork/root/g", 0o600);
    bed.merge();
    assert!(bed.read("src/root/g") == large);
    assert_eq!(bed.getxattr("src/root/g", "user.note").unwrap(), b"ours");
    let attr = bed.attr("src/root/g");
    assert_eq!((attr.nlink, attr.perm), (1, 0o600));
    assert!(bed.find("src/f").is_none());
}

/// Nobody gave the fork's bytes, or a new owner's file, the capabilities of a program.
#[test]
fn capabilities_stay_with_the_contents_and_the_owner_that_had_them() {
    const NAME: &str = "security.capability";
    const CAP: &[u8] = &[1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let names = ["bytes", "lines", "owner", "mode", "attribute", "theirs"];
    let bed = Bed::new(|bed| {
        for name in names {
            bed.write(&format!("src/{name}"), TEXT);
        }
    });
    for name in &names[..5] {
        bed.setxattr(&format!("src/{name}"), NAME, CAP);
    }
    bed.write("fork/bytes", b"the fork's");
    bed.write("fork/lines", &with("one", "1"));
    bed.write("src/lines", &with("seven", "7"));
    bed.setxattr("src/lines", NAME, CAP);
    let set = SetAttr {
        uid: Some(7),
        ..SetAttr::default()
    };
    bed.set("fork/owner", set);
    bed.chmod("fork/mode", 0o500);
    bed.setxattr("fork/attribute", "user.note", b"note");
    bed.write("fork/theirs", b"the fork's");
    bed.setxattr("fork/theirs", NAME, CAP);
    bed.chmod("src/theirs", 0o500);
    bed.merge();
    let has = |name| bed.getxattr(&format!("src/{name}"), NAME).is_some();
    assert_eq!(
        names.map(has),
        [false, false, false, true, true, true],
        "{names:?}"
    );
    assert_eq!(bed.read("src/bytes"), b"the fork's");
    assert_eq!(bed.attr("src/owner").uid, 7);
}

#[test]
fn set_ids_come_only_with_owner_and_contents_of_one_side() {
    let bed = Bed::new(|bed| {
        bed.write("src/f", b"old");
        bed.write("src/g", b"old");
        for path in ["src/f", "src/g"] {
            bed.set(
                path,
                SetAttr {
                    uid: Some(9),
                    ..SetAttr::default()
                },
            );
        }
    });
    for path in ["fork/f", "fork/g"] {
        bed.write(path, b"a program");
        bed.chmod(path, 0o4755);
    }
    bed.set(
        "src/f",
        SetAttr {
            uid: Some(0),
            ..SetAttr::default()
        },
    );
    bed.merge();
    let (f, g) = (bed.attr("src/f"), bed.attr("src/g"));
    assert_eq!(
        (f.uid, f.perm),
        (0, 0o755),
        "the contents are not those of the owner"
    );
    assert_eq!((g.uid, g.perm), (9, 0o4755));
}

#[test]
fn repositories_that_both_sides_added_are_not_mixed() {
    let bed = Bed::new(|_| {});
    for (top, text) in [("fork", &b"theirs"[..]), ("src", b"ours")] {
        for dir in ["vendor", "vendor/.git"] {
            bed.dir(&format!("{top}/{dir}"));
        }
        bed.write(&format!("{top}/vendor/.git/HEAD"), text);
        bed.write(&format!("{top}/vendor/same"), b"same");
    }
    bed.write("fork/vendor/.git/object", b"new");
    let options = MergeOptions {
        favor: Favor::Theirs,
        left_out: LeftOut {
            git: true,
            ..LeftOut::default()
        },
        ..MergeOptions::default()
    };
    let merged = bed.try_merge(&Caller::root(), &options).unwrap();
    assert!(merged.is_done && merged.left_out > 0);
    assert_eq!(bed.read("src/vendor/.git/HEAD"), b"ours");
    assert!(bed.find("src/vendor/.git/object").is_none());
}

/// Files of a clone have the births of the originals, so one that is gone and one that is new may
/// be two files.
#[test]
fn files_of_clones_are_not_taken_for_renamed_ones() {
    for (renames, keeps_copy) in [("src", false), ("fork", false), ("src", true)] {
        let bed = Bed::new(|bed| {
            bed.dir("src/d");
            bed.write("src/d/f", b"A");
            let (trees, root) = (bed.volume.trees(), Caller::root());
            let mode = CloneMode::New;
            trees
                .clone_entry(&root, bed.at("src/d"), bed.at("src"), b"e", mode)
                .unwrap();
        });
        let (path, edits) = (
            |name: &str| format!("{renames}/{name}"),
            if renames == "src" { "fork" } else { "src" },
        );
        let mtime = Some(SetTime::At(bed.attr("src/d/f").mtime));
        bed.remove(&path("e/f"));
        bed.rename(&path("d/f"), &path("d/f.bak"));
        if keeps_copy {
            bed.write(&path("d/f"), b"A");
            let set = SetAttr {
                mtime,
                ..SetAttr::default()
            };
            bed.set(&path("d/f"), set);
        } else {
            bed.write(&path("d/f"), b"C");
        }
        bed.write(&format!("{edits}/e/f"), b"B");
        let clash = match renames {
            "src" => Clash::GoneInDestination,
            _ => Clash::GoneInFork,
        };
        bed.clash("e/f", clash);
        assert!(bed.merge_as(Favor::Theirs).is_done);
        assert_eq!(bed.read("src/d/f.bak"), b"A", "{renames} {keeps_copy}");
        assert_eq!(bed.find("src/e/f").is_some(), renames == "src");
    }
}

#[test]
fn two_renames_of_one_file_are_a_conflict() {
    let bed = text();
    bed.rename("fork/f", "fork/g");
    bed.rename("src/f", "src/h");
    bed.clash("h", Clash::BothRenamed);
}

#[test]
fn a_second_merge_finds_nothing_where_the_destination_had_renamed_a_directory() {
    let bed = Bed::new(|bed| bed.dir("src/b"));
    for top in ["fork", "src"] {
        bed.rename(&format!("{top}/b"), &format!("{top}/c"));
    }
    bed.dir("src/b");
    bed.merge();
    assert!(bed.find("src/b").is_none());
    bed.merge_of_nothing();
}

/// Files that a merge takes have its time, which makes no directory another one.
#[test]
fn a_second_merge_finds_nothing_in_a_renamed_directory_that_got_files_of_the_fork() {
    let bed = Bed::new(|bed| bed.dir("src/d"));
    bed.rename("src/d", "src/b");
    bed.remove("fork/d");
    bed.dir("fork/b");
    bed.write("fork/b/f", b"new");
    bed.clash("b", Clash::GoneInFork);
    assert!(bed.merge_as(Favor::Ours).is_done);
    assert_eq!(bed.read("src/b/f"), b"new");
    bed.merge_of_nothing();
}

#[test]
fn renames_with_the_same_outcome_are_no_work() {
    let bed = Bed::new(|bed| {
        bed.dir("src/d");
        for file in ["d/in", "f", "g"] {
            bed.write(&format!("src/{file}"), TEXT);
        }
    });
    // Both sides renamed the directory. The fork removed one file and wrote an equal one.
    for top in ["fork", "src"] {
        bed.rename(&format!("{top}/d"), &format!("{top}/e"));
    }
    bed.remove("fork/f");
    bed.write("fork/f2", TEXT);
    bed.rename("src/f", "src/f2");
    // Each side wrote the file anew that the other one has renamed.
    bed.rename("fork/g", "fork/g2");
    bed.write("fork/g3", TEXT);
    bed.rename("src/g", "src/g3");
    bed.write("src/g2", TEXT);
    let before = bed.listing("src");
    bed.merge_of_nothing();
    assert_eq!(bed.listing("src"), before);
    bed.write("src/e/in", b"changed");
    bed.write("src/f2", b"changed");
    bed.chmod("src/g3", 0o700);
    let conflicts = [
        ("e", Clash::GoneInFork),
        ("e/in", Clash::BothAdded),
        ("f2", Clash::GoneInFork),
        ("f2", Clash::BothAdded),
        ("g3", Clash::BothRenamed),
        ("g3", Clash::BothAdded),
    ];
    let conflicts = conflicts.map(|(path, clash)| (path.to_owned(), clash));
    assert_eq!(bed.clashes(), conflicts);
}

#[test]
fn removals_meet_edits_and_new_names() {
    let bed = Bed::new(|bed| {
        bed.write("src/f", TEXT);
        bed.write("src/g", TEXT);
        bed.dir("src/d");
        bed.write("src/d/in", b"in");
        bed.dir("src/e");
    });
    for gone in ["fork/f", "fork/d", "src/g", "src/e"] {
        bed.remove(gone);
    }
    bed.write("src/f", b"ours");
    bed.write("src/d/new", b"new");
    bed.write("fork/g", b"theirs");
    bed.write("fork/e/new", b"new");
    let wanted = [
        ("d", Clash::GoneInFork),
        ("e", Clash::GoneInDestination),
        ("f", Clash::GoneInFork),
        ("g", Clash::GoneInDestination),
    ];
    let wanted = wanted.map(|(path, clash)| (path.to_owned(), clash));
    assert_eq!(bed.clashes(), wanted);
    assert!(bed.merge_as(Favor::Theirs).is_done);
    assert!(bed.find("src/f").is_none() && bed.find("src/d").is_none());
    assert_eq!(bed.read("src/g"), b"theirs");
    assert_eq!(bed.read("src/e/new"), b"new");
}

#[test]
fn a_file_that_the_fork_moved_into_a_directory_that_is_taken_has_one_name() {
    let new = || {
        let bed = Bed::new(|bed| {
            bed.dir("src/d");
            for file in ["a", "b"] {
                bed.write(&format!("src/{file}"), b"A");
            }
        });
        for file in ["a", "b"] {
            bed.rename(&format!("fork/{file}"), &format!("fork/d/{file}"));
        }
        bed.remove("src/d");
        bed
    };
    let bed = new();
    bed.clash("d", Clash::GoneInDestination);
    assert!(bed.merge_as(Favor::Ours).is_done);
    assert_eq!(names(&bed.volume, bed.at("src")), [b"a", b"b"]);
    assert!(bed.merge_as(Favor::Theirs).is_done);
    assert_eq!(names(&bed.volume, bed.at("src")), [b"d"]);
    assert_eq!(names(&bed.volume, bed.at("src/d")), [b"a", b"b"]);
    let bed = new();
    let options = MergeOptions {
        favor: Favor::Theirs,
        left_out: LeftOut {
            apart: vec![b"d".to_vec()],
            ..LeftOut::default()
        },
        ..MergeOptions::default()
    };
    assert!(bed.try_merge(&Caller::root(), &options).unwrap().is_done);
    assert_eq!(names(&bed.volume, bed.at("src")), [b"a", b"b"]);
}

#[test]
fn trees_added_on_both_sides_become_one() {
    let bed = Bed::new(|_| {});
    for (top, own) in [("fork", "theirs"), ("src", "ours")] {
        bed.dir(&format!("{top}/d"));
        bed.write(&format!("{top}/d/{own}"), own.as_bytes());
        bed.write(&format!("{top}/d/same"), b"same");
    }
    bed.merge();
    assert_eq!(bed.read("src/d/theirs"), b"theirs");
    assert_eq!(bed.read("src/d/ours"), b"ours");
    bed.write("fork/d/ours", b"another");
    bed.clash("d/ours", Clash::BothAdded);
}

#[test]
fn a_directory_that_both_sides_added_is_not_opened_by_a_merge() {
    let bed = Bed::new(|_| {});
    for top in ["fork", "src"] {
        for dir in ["keys", "keys/in", "keys/same"] {
            bed.dir(&format!("{top}/{dir}"));
        }
    }
    for dir in ["fork/keys", "fork/keys/in"] {
        bed.chmod(dir, 0o700);
        bed.write(&format!("{dir}/k"), b"k");
    }
    let uid = Some(7);
    let set = SetAttr {
        uid,
        ..SetAttr::default()
    };
    bed.set("fork/keys/in", set);
    bed.setxattr("fork/keys", "user.a", b"theirs");
    bed.setxattr("src/keys", "user.b", b"ours");
    let attribute = |name: &[u8]| Clash::Attribute(name.to_vec());
    let conflicts = [
        ("keys", Clash::Mode),
        ("keys", attribute(b"user.a")),
        ("keys", attribute(b"user.b")),
        ("keys/in", Clash::Mode),
        ("keys/in", Clash::Owner),
    ];
    let conflicts = conflicts.map(|(path, clash)| (path.to_owned(), clash));
    assert_eq!(bed.clashes(), conflicts);
    assert!(bed.merge_as(Favor::Theirs).is_done);
    assert_eq!(
        (bed.attr("src/keys").perm, bed.attr("src/keys").uid),
        (0o700, 0)
    );
    let attr = bed.attr("src/keys/in");
    assert_eq!((attr.perm, attr.uid), (0o700, 7));
    assert_eq!(bed.getxattr("src/keys", "user.a").unwrap(), b"theirs");
    assert!(bed.getxattr("src/keys", "user.b").is_none());
    assert_eq!(bed.read("src/keys/in/k"), b"k");
    bed.merge_of_nothing();
}

#[test]
fn names_of_hard_links_are_merged_as_far_as_they_can() {
    let bed = Bed::new(|bed| {
        bed.write("src/a", TEXT);
        bed.link("src/a", "src/b");
        bed.link("src/a", "src/c");
    });
    bed.remove("fork/c");
    bed.chmod("fork/a", 0o600);
    bed.dir("fork/d");
    bed.write("fork/d/x", b"x");
    bed.link("fork/d/x", "fork/d/y");
    bed.merge();
    assert!(bed.find("src/c").is_none());
    let attr = bed.attr("src/b");
    assert_eq!(
        (attr.nlink, attr.perm, attr.ino),
        (2, 0o600, bed.at("src/a"))
    );
    let attr = bed.attr("src/d/y");
    assert_eq!((attr.nlink, attr.ino), (2, bed.at("src/d/x")));
    bed.write("fork/a", b"theirs");
    let wanted = ["a", "b"].map(|name| (name.to_owned(), Clash::HardLinks));
    assert_eq!(bed.clashes(), wanted);
    assert!(bed.merge_as(Favor::Theirs).is_done);
    assert_eq!(
        (bed.read("src/a"), bed.attr("src/a").nlink),
        (b"theirs".to_vec(), 1)
    );
}

#[test]
fn merge_is_in_place_and_taken_files_have_its_time() {
    let bed = Bed::new(|bed| {
        bed.dir("src/d");
        bed.write("src/d/f", b"old");
        bed.write("src/d/other", b"other");
    });
    let then = SetTime::At(Time { secs: 5, nanos: 0 });
    bed.write("fork/d/f", b"taken");
    bed.set(
        "fork/d/f",
        SetAttr {
            mtime: Some(then),
            ..SetAttr::default()
        },
    );
    let open = bed.at("src/d/f");
    let stay = ["src", "src/d", "src/d/other"];
    let before = stay.map(|path| bed.at(path));
    bed.merge();
    assert_eq!(stay.map(|path| bed.at(path)), before);
    assert_ne!(bed.at("src/d/f"), open);
    assert_eq!(
        bed.volume.files().read(open, 0, 9).unwrap(),
        b"old",
        "an open file stays"
    );
    let attr = bed.attr("src/d/f");
    assert!(attr.mtime.secs > 5, "{attr:?}");
}

#[test]
fn a_merge_may_be_refused_or_only_told() {
    let bed = text();
    bed.write("fork/f", b"theirs");
    let told = MergeOptions {
        dry_run: true,
        ..MergeOptions::default()
    };
    let forward = MergeOptions {
        only_forward: true,
        ..MergeOptions::default()
    };
    let root = Caller::root();
    let merged = bed.try_merge(&root, &told).unwrap();
    assert_eq!(merged.names, [(b"f".to_vec(), MergedName::Taken)]);
    assert_eq!(bed.read("src/f"), TEXT);
    bed.write("src/g", b"ours");
    let merged = bed.try_merge(&root, &forward).unwrap();
    assert!(!merged.is_done && !merged.is_forward);
    bed.remove("src/g");
    assert!(bed.try_merge(&root, &forward).unwrap().is_done);
    assert_eq!(bed.read("src/f"), b"theirs");
}

/// The base of a fork is older than the fork.
#[test]
fn a_fork_in_its_source_is_no_change_of_it() {
    let bed = text();
    bed.dir("src/d");
    let new = NewFork {
        note: "",
        has_base: true,
    };
    let (root, src, d) = (Caller::root(), bed.at("src"), bed.at("src/d"));
    let trees = bed.volume.trees();
    trees.fork(&root, src, (d, b"inside"), new).unwrap();
    bed.write("src/d/inside/f", b"theirs");
    let forward = MergeOptions {
        only_forward: true,
        ..MergeOptions::default()
    };
    let merge = || {
        let both = (bed.volume.trees(), bed.volume.controls().forks());
        merge_fork(both, &root, (bed.at("src/d/inside"), src), &forward).unwrap()
    };
    bed.write("src/d/inside2", b"ours");
    assert!(!merge().is_done);
    bed.remove("src/d/inside2");
    let merged = merge();
    assert!(merged.is_done && merged.is_forward, "{merged:?}");
    assert_eq!(bed.read("src/f"), b"theirs");
}

#[test]
fn names_that_are_left_out_stay() {
    let bed = text();
    for path in ["fork/.git", "fork/target", "fork/d"] {
        bed.dir(path);
        bed.write(&format!("{path}/x"), b"x");
    }
    let options = MergeOptions {
        left_out: LeftOut {
            git: true,
            paths: vec![b"target".to_vec()],
            ..LeftOut::default()
        },
        ..MergeOptions::default()
    };
    let merged = bed.try_merge(&Caller::root(), &options).unwrap();
    assert_eq!((merged.is_done, merged.left_out), (true, 2));
    assert_eq!(bed.read("src/d/x"), b"x");
    assert!(bed.find("src/.git").is_none() && bed.find("src/target").is_none());
}

/// Nobody said that names which are left out go with a directory.
#[test]
fn a_directory_with_names_that_are_left_out_is_not_replaced_by_another_kind() {
    let bed = Bed::new(|bed| {
        for path in ["src/other", "src/pkg", "src/file"] {
            bed.dir(path);
        }
        bed.write("src/pkg/tracked", TEXT);
        bed.write("src/pkg/.env", b"secret");
        bed.write("src/file/.env", b"secret");
    });
    for path in ["fork/pkg", "fork/file"] {
        bed.remove(path);
    }
    bed.symlink(("fork", "pkg"), b"other");
    bed.write("fork/file", b"a file");
    let options = MergeOptions {
        left_out: LeftOut {
            paths: vec![b"pkg/.env".to_vec(), b"file/.env".to_vec()],
            ..LeftOut::default()
        },
        ..MergeOptions::default()
    };
    let merged = bed.try_merge(&Caller::root(), &options).unwrap();
    let told = merged.conflicts.iter();
    let told: Vec<_> = told.map(|one| (&one.path[..], &one.clash)).collect();
    assert_eq!(told, [(&b"file"[..], &Clash::Kind), (b"pkg", &Clash::Kind)]);
    assert_eq!(bed.read("src/pkg/.env"), b"secret");
}

#[test]
fn directories_that_are_the_forks_alone_are_not_taken_as_a_whole() {
    let bed = text();
    for path in [
        "src/both",
        "fork/both",
        "fork/new",
        "fork/new/tree",
        "fork/tree",
    ] {
        bed.dir(path);
    }
    for path in ["fork/tree", "fork/new/tree", "fork/new", "fork/both"] {
        bed.write(&format!("{path}/x"), b"x");
    }
    let apart = ["tree", "new/tree", "both"].map(|path| path.as_bytes().to_vec());
    let options = MergeOptions {
        left_out: LeftOut {
            apart: apart.to_vec(),
            ..LeftOut::default()
        },
        ..MergeOptions::default()
    };
    let merged = bed.try_merge(&Caller::root(), &options).unwrap();
    assert_eq!((merged.is_done, merged.left_out), (true, 2));
    assert_eq!(bed.read("src/both/x"), b"x");
    assert!(bed.find("src/tree").is_none() && bed.find("src/new").is_none());
}

/// A directory that is the fork's alone does not come, so no object of the destination goes for it.
#[test]
fn a_renamed_file_stays_where_the_fork_has_a_directory_of_its_own() {
    let bed = Bed::new(|bed| bed.write("src/a", TEXT));
    bed.rename("src/a", "src/b");
    bed.remove("fork/a");
    bed.dir("fork/a");
    let options = MergeOptions {
        favor: Favor::Theirs,
        left_out: LeftOut {
            apart: vec![b"a".to_vec()],
            ..LeftOut::default()
        },
        ..MergeOptions::default()
    };
    let merged = bed.try_merge(&Caller::root(), &options).unwrap();
    assert!(merged.is_done);
    assert_eq!(bed.read("src/b"), TEXT);
}

#[test]
fn each_name_needs_the_rights_of_cp_and_mv() {
    let bed = Bed::new(|bed| {
        bed.dir("src/d");
        bed.write("src/d/f", b"old");
        for path in ["src", "src/d", "src/d/f"] {
            let (uid, gid) = (Some(9), Some(9));
            bed.set(
                path,
                SetAttr {
                    uid,
                    gid,
                    ..SetAttr::default()
                },
            );
        }
    });
    let user = Caller::user(9, 9);
    bed.write("fork/d/f", b"new");
    let refused = |caller: &Caller| {
        let merged = bed.try_merge(caller, &MergeOptions::default());
        matches!(merged, Err(Error::NotPermitted | Error::Access))
    };
    assert!(
        refused(&Caller::user(8, 8)),
        "the trees are of another user"
    );
    bed.chmod("src/d", 0o555);
    assert!(refused(&user), "the directory may not be changed");
    bed.chmod("src/d", 0o755);
    bed.set(
        "fork/d/f",
        SetAttr {
            uid: Some(0),
            ..SetAttr::default()
        },
    );
    assert!(refused(&user), "the new file is of another user");
    bed.set(
        "fork/d/f",
        SetAttr {
            uid: Some(9),
            ..SetAttr::default()
        },
    );
    let merged = bed.try_merge(&user, &MergeOptions::default()).unwrap();
    assert!(merged.is_done);
    assert_eq!(bed.read("src/d/f"), b"new");
}

#[test]
fn a_directory_gets_its_slot_index_in_the_middle_of_a_merge() {
    let bed = Bed::new(|bed| {
        for n in 0..1_000 {
            bed.make(&format!("src/{n}"), Kind::Regular);
        }
    });
    for n in 1_000..1_100 {
        bed.write(&format!("fork/{n}"), b"new");
    }
    bed.merge();
    assert_eq!(names(&bed.volume, bed.at("src")).len(), 1_100);
    bed.write("src/more", b"more");
    assert!(bed.volume.controls().check().unwrap().is_empty());
}

#[test]
fn the_table_holds_for_merges_that_are_staged() {
    const NAME: &str = "the_table_holds_for_merges_that_are_staged";
    if variable(STAGED).is_some() {
        return;
    }
    let tests = std::env::current_exe().unwrap();
    let mut tests = Command::new(tests);
    let ran = tests.env(STAGED, "1").args(["--skip", NAME]).output();
    let ran = ran.unwrap();
    let told = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success(), "{told}");
    assert!(!told.contains(" 0 passed"), "{told}");
}

/// A writer changes a file that the fork changes, or one in a directory that it removes. A write
/// after which the name still leads to the old file came before the merge, which then is none.
#[test]
fn no_answered_write_is_lost_beside_a_merge() {
    const ROUNDS: u64 = 200;
    let mut before = 0;
    for round in 0..ROUNDS {
        let bed = Bed::new(|bed| {
            bed.write("src/f", &[0; 64]);
            bed.dir("src/d");
            bed.write("src/d/g", &[0; 64]);
        });
        bed.write("fork/f", b"fork's");
        bed.remove("fork/d");
        let path = ["src/f", "src/d/g"][usize::from(round % 2 == 0)];
        let (ino, delay) = (bed.at(path), Duration::from_micros(round * 2));
        let (merged, was_first) = thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let start = Instant::now();
                while start.elapsed() < delay {
                    std::hint::spin_loop();
                }
                bed.volume.files().write(ino, 0, b"answered", None).unwrap();
                bed.find(path) == Some(ino)
            });
            let options = MergeOptions {
                parts: parts(),
                ..MergeOptions::default()
            };
            let merged = bed.try_merge(&Caller::root(), &options);
            (merged.unwrap(), writer.join().unwrap())
        });
        assert!(!(merged.is_done && was_first), "round {round}: {merged:?}");
        assert_eq!(merged.is_done, merged.conflicts.is_empty());
        before += u64::from(was_first);
        let seen = bed.volume.files().read(ino, 0, 8).unwrap();
        assert_eq!(seen, b"answered", "the old file has the write");
    }
    println!("{before} of {ROUNDS} writes came first");
}
