//! Clone roots are joined, so that links may cross them.
//!
//! All names of a file with several are link entries of one clone root. A link, or a move of link
//! entries, between two clone roots makes them one first: the inner one becomes a plain directory of
//! the clone root around it. Its shared inodes move there, each under a new number and with its
//! inode number pinned, and its link entries name them by the new numbers. That changes nothing that
//! a user can see. A clone root is joined once; a clone of it is a
//! clone root again.
//!
//! Most clone roots have no hard links when they are joined: then the batch changes one record. One
//! with more than some thousand names of hard links is joined in parts, each a batch. Until the last
//! one it is a clone root still, marked in its record and by a note: shared inodes that it does not
//! have are those of the clone root around it. Readers may see that. Operations on links and
//! directories wait for the end, also after a crash: the next opener of the volume finishes the join
//! first. Links that wait to be counted are counted before.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use ramet_betree::successor_of_prefix;
use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::ino::ROOT_INO;
use crate::format::keys::{self, NoteKey};
use crate::format::record::{Entry, FLAG_CLONE_ROOT, FLAG_JOINING, LinkEntry};
use crate::format::slots::Slot;
use crate::namespace::inode::{Inode, Location};
use crate::namespace::link_counts::{last_note, note_changed};
use crate::namespace::notes::link_of;
use crate::namespace::numbers::Numbers;
use crate::namespace::resolve::{Namespace, View};
use crate::namespace::transaction::{Transaction, lock_states};
use crate::ops::contents::move_contents;
use crate::ops::hard_links::AT_ONCE;
use crate::ops::settle::Settling;

/// Names of hard links that one batch of a join moves, at most, about, and at least for tests.
const PART_LEN_MAX: usize = 1024;
const PART_LEN_MIN: usize = 2;
/// Journal bytes of such a batch, about.
const PART_BYTES: usize = 1 << 20;
/// Keys that change with one name, and further bytes of that.
const KEYS_OF_NAME: usize = 4;
const NAME_BYTES: usize = 256;
/// Groups of files by their link numbers.
const BUCKETS: usize = 1 << 16;

/// A name of a shared inode that moves.
struct Name {
    /// Path of the directory.
    dir: Bytes,
    name: Bytes,
    entry: LinkEntry,
}

/// A shared inode that moves.
struct Moving {
    inode: Arc<Inode>,
    /// Numbers before and after.
    link: u64,
    new_link: u64,
    names: Vec<Name>,
}

/// Joins clone roots.
pub(crate) struct Joins {
    namespace: Arc<Namespace>,
    numbers: Arc<Numbers>,
    pub(super) settling: Arc<Settling>,
}

impl Joins {
    pub(crate) fn new(
        namespace: &Arc<Namespace>,
        numbers: &Arc<Numbers>,
        settling: &Arc<Settling>,
    ) -> Self {
        Self {
            namespace: Arc::clone(namespace),
            numbers: Arc::clone(numbers),
            settling: Arc::clone(settling),
        }
    }

    /// Makes one clone root of those of two directories.
    ///
    /// # Errors
    /// `TooManyLinks` when a file in the inner one has more names than a batch takes, and those of
    /// the tree.
    pub(super) fn join(&self, one: &Arc<Inode>, two: &Arc<Inode>) -> Result<()> {
        while let Some(inner) = self.inner_root(one, two)? {
            self.join_root(&inner)?;
        }
        Ok(())
    }

    /// Goes on with joins that a crash ended.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn finish_joins(&self) -> Result<()> {
        if !self.namespace.unsettled.may_have_notes() {
            return Ok(());
        }
        let prefix = keys::range(keys::NOTES, b"");
        let end = successor_of_prefix(&prefix);
        let mut scan = self.namespace.tree.scan(&prefix, end.as_deref());
        let mut paths = Vec::new();
        while scan.advance()? {
            if let Some((path, NoteKey::Joining)) = keys::parse_note(scan.key()) {
                paths.push(path.to_vec());
            }
        }
        // The outer ones come first.
        'paths: for path in paths {
            let mut dir = self.namespace.dir(ROOT_INO)?;
            for name in keys::names_between(b"", &path) {
                let found = {
                    let _names = dir.names.read();
                    self.namespace.find(&dir, name)?
                };
                let Some(found) = found else {
                    tracing::warn!("a clone root that was being joined is gone");
                    continue 'paths;
                };
                dir = found;
            }
            self.join_root(&dir)?;
        }
        Ok(())
    }

    /// The clone root of one of two directories that lies deeper; `None` if they have one.
    fn inner_root(&self, one: &Arc<Inode>, two: &Arc<Inode>) -> Result<Option<Arc<Inode>>> {
        let topology = self.namespace.topology.read();
        let root = |dir: &Arc<Inode>| topology.clone_root(dir).map_err(gone_is_not_found);
        let roots = [root(one)?, root(two)?];
        if Arc::ptr_eq(&roots[0], &roots[1]) {
            return Ok(None);
        }
        let depth = |root: &Arc<Inode>| -> Result<usize> {
            let path = topology.dir_path(root).map_err(gone_is_not_found)?.path;
            Ok(keys::names_between(b"", &path).count())
        };
        let is_first = depth(&roots[0])? >= depth(&roots[1])?;
        let [first, second] = roots;
        Ok(Some(if is_first { first } else { second }))
    }

    /// Names that one batch moves at most.
    fn part_len(&self) -> usize {
        let at_once = self.namespace.unsettled.links_at_once;
        PART_LEN_MIN.max(PART_LEN_MAX.min(at_once * PART_LEN_MAX / AT_ONCE))
    }

    /// Joins a clone root to the one around it. The links are held for writing all the time, so
    /// only readers see a clone root that is joined in part.
    fn join_root(&self, root: &Arc<Inode>) -> Result<()> {
        let part_bytes = PART_BYTES.min(self.namespace.tree.batch_bytes_max() / 2);
        self.namespace.tree.admit(part_bytes)?;
        // Few are left to be stored with the links held.
        self.numbers.store_all()?;
        let _links = loop {
            self.settling.settle_root(root)?;
            let links = self.namespace.links.write();
            if !root.is_clone_root() {
                return Ok(());
            }
            // Another operation may have made a note meanwhile.
            if last_note(&self.namespace, root)? == 0 {
                break links;
            }
        };
        let outer = {
            let topology = self.namespace.topology.read();
            let parent = self.namespace.parent(root);
            topology.clone_root(&parent).map_err(gone_is_not_found)?
        };
        let (mut moving, mut is_last) = self.moving(root)?;
        if !is_last {
            self.fits(root)?;
            self.begin(root)?;
        }
        while !is_last {
            self.move_part(root, &outer, &moving)?;
            self.namespace.tree.admit(part_bytes)?;
            (moving, is_last) = self.moving(root)?;
        }
        self.end(root, &outer, &moving)
    }

    /// Refuses a join that would stop half way: all names of a file move in one batch.
    fn fits(&self, root: &Arc<Inode>) -> Result<()> {
        let view = self.namespace.view(root)?;
        let index = keys::link_index(&view.dir.path);
        let end = successor_of_prefix(&index);
        let bytes_max = self.namespace.tree.batch_bytes_max() / 4;
        // Bytes of the names of some files each, so of one file at least.
        let mut bytes = vec![0; BUCKETS];
        let mut scan = view.snapshot.scan(&index, end.as_deref());
        while scan.advance()? {
            let link = link_of(scan.value())?;
            let bucket = usize::try_from(link % BUCKETS as u64).expect("below their number");
            bytes[bucket] += KEYS_OF_NAME * scan.key().len() + NAME_BYTES;
            if bytes[bucket] > bytes_max {
                return Err(Error::TooManyLinks);
            }
        }
        Ok(())
    }

    /// Marks a clone root that is joined in parts.
    fn begin(&self, root: &Arc<Inode>) -> Result<()> {
        self.namespace.unsettled.expect_note();
        let mut tx = Transaction::new(lock_states(&[root]));
        tx.edit(root).flags |= FLAG_JOINING;
        let topology = self.namespace.topology.read();
        let path = topology.dir_path(root).map_err(gone_is_not_found)?.path;
        tx.batch.put(keys::joining(&path), "");
        root.is_joining.store(true, Ordering::SeqCst);
        tx.apply(&topology, &self.namespace.tree)?.make_durable()
    }

    /// Moves some shared inodes.
    fn move_part(&self, root: &Arc<Inode>, outer: &Arc<Inode>, part: &[Moving]) -> Result<()> {
        let counted = last_note(&self.namespace, outer)?;
        let inodes: Vec<_> = part.iter().map(|one| &one.inode).collect();
        let mut tx = Transaction::new(lock_states(&inodes));
        let mut topology = self.namespace.topology.write();
        let paths = [root, outer].map(|dir| topology.dir_path(dir).map_err(gone_is_not_found));
        let [from, to] = paths;
        let paths = (&from?.path, &to?.path);
        let shared = part.iter().map(|one| &one.inode);
        let protections = &self.namespace.protections;
        protections.join(&mut tx, &topology, (root, outer), shared)?;
        for one in part {
            one.put(&mut tx, (root, outer), paths, counted);
        }
        let shown = tx.apply(&topology, &self.namespace.tree)?;
        topology.generation += 1;
        *outer.has_links.lock() = Some(true);
        shown.make_durable()
    }

    /// Moves the last shared inodes, and makes the clone root a plain directory.
    fn end(&self, root: &Arc<Inode>, outer: &Arc<Inode>, moving: &[Moving]) -> Result<()> {
        let namespace = &self.namespace;
        let counted = last_note(namespace, outer)?;
        let mut inodes = vec![root];
        inodes.extend(moving.iter().map(|one| &one.inode));
        let mut tx = Transaction::new(lock_states(&inodes));
        let mut topology = namespace.topology.write();
        let paths = [root, outer].map(|dir| topology.dir_path(dir).map_err(gone_is_not_found));
        let [from, to] = paths;
        let paths = (&from?.path, &to?.path);
        let shared = moving.iter().map(|one| &one.inode);
        let protections = &namespace.protections;
        protections.join(&mut tx, &topology, (root, outer), shared)?;
        for one in moving {
            one.put(&mut tx, (root, outer), paths, counted);
        }
        if root.is_joining.load(Ordering::SeqCst) {
            tx.batch.delete(keys::joining(paths.0));
        }
        tx.edit(root).flags &= !(FLAG_CLONE_ROOT | FLAG_JOINING);
        let shown = tx.apply(&topology, &namespace.tree)?;
        topology.generation += 1;
        root.is_plain();
        if !moving.is_empty() {
            *outer.has_links.lock() = Some(true);
        }
        note_changed(root);
        shown.make_durable()
    }

    /// Shared inodes of a clone root that have names, with all their names. Tells whether these are
    /// the last ones. Their numbers are stored. The links are held for writing.
    fn moving(&self, root: &Arc<Inode>) -> Result<(Vec<Moving>, bool)> {
        let view = self.namespace.view(root)?;
        let index = keys::link_index(&view.dir.path);
        let end = successor_of_prefix(&index);
        let mut names: BTreeMap<u64, Vec<Name>> = BTreeMap::new();
        // The first names tell the shared inodes. Their other names may be anywhere.
        let mut scan = view.snapshot.scan(&index, end.as_deref());
        let (mut len, mut is_last) = (0, true);
        while scan.advance()? {
            let link = link_of(scan.value())?;
            if len >= self.part_len() && !names.contains_key(&link) {
                is_last = false;
                continue;
            }
            len += 1;
            let name = name_of(&view, scan.key())?;
            names.entry(link).or_default().push(name);
        }
        let moving = names.into_iter().map(|(link, names)| {
            let inode = self.namespace.shared_inode(&view, link, root)?;
            Ok(Moving {
                inode,
                link,
                new_link: self.numbers.generation()?,
                names,
            })
        });
        let moving = moving.collect::<Result<_>>()?;
        // Inodes that were never shown have got their numbers here, maybe in memory only. A number
        // above the stored counter is given again after the next mount, so none is pinned.
        self.numbers.store_all()?;
        Ok((moving, is_last))
    }
}

/// The link entry that a key of the link index of the view's directory tells of.
fn name_of(view: &View, key: &[u8]) -> Result<Name> {
    let corrupt = || Error::Corrupt {
        what: "link index",
        detail: format!("{key:?} is no link entry"),
    };
    let (dir, name) = keys::link_name(&view.dir.path, key).ok_or_else(corrupt)?;
    let value = view.snapshot.get(&keys::entry(&dir, &name))?;
    match value.as_ref().map(Entry::decode).transpose()? {
        Some(Entry::Link(entry)) => Ok(Name { dir, name, entry }),
        _ => Err(corrupt()),
    }
}

impl Moving {
    /// Moves the shared inode from the clone root `root` to `outer`, which have these paths.
    fn put(
        &self,
        tx: &mut Transaction<'_>,
        (root, outer): (&Arc<Inode>, &Arc<Inode>),
        (from, to): (&Bytes, &Bytes),
        counted: u64,
    ) {
        let paths = (
            keys::shared_inode(from, self.link),
            keys::shared_inode(to, self.new_link),
        );
        let record = tx.get(&self.inode).clone();
        move_contents(tx, &record, &paths.0, &paths.1, None);
        tx.batch.delete(keys::shared_record(&paths.0));
        let slot = Slot::shared(self.new_link);
        tx.pin(&self.inode, root.identity(), outer.identity(), slot);
        tx.lose(root, Slot::shared(self.link));
        tx.edit(&self.inode).counted = counted;
        let pin = tx.get(&self.inode).pin;
        let is_lost = failpoints::is_on(Fault::JoinedNameLost);
        for Name { dir, name, entry } in self.names.iter().skip(usize::from(is_lost)) {
            let entry = LinkEntry {
                link: self.new_link,
                pin,
                ..*entry
            };
            tx.batch.put(keys::entry(dir, name), entry.encode());
            tx.batch.delete(keys::link(from, dir, name));
            let index = keys::link(to, dir, name);
            tx.batch.put(index, self.new_link.to_be_bytes().to_vec());
        }
        let via = match tx.location(&self.inode) {
            Location::Shared { via, .. } => via,
            _ => Arc::clone(root),
        };
        let location = Location::Shared {
            root: Arc::clone(outer),
            link: self.new_link,
            via,
        };
        tx.move_to(&self.inode, location);
    }
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device, MemDevice};

    use crate::{
        Caller, CloneMode, ControlState, FormatOptions, Ino, Kind, NewInode, NewObject,
        OpenOptions, RenameMode, SendPage, SendRequest, StreamItem, StreamItems, Volume,
    };

    use super::*;

    fn is_no_space<T>(result: Result<T>) -> bool {
        matches!(result, Err(Error::Tree(ramet_betree::Error::NoSpace)))
    }

    #[test]
    fn directories_below_a_clone_root_that_is_joined_in_part_stay_until_they_are_empty() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let (names, trees, root) = (volume.names(), volume.trees(), Caller::root());
        let make = |dir, name: &str, kind| {
            let new = NewInode::new(kind, 0o755);
            names.create(dir, name.as_bytes(), &new).unwrap().ino
        };
        let find = |dir: Ino, name: &str| names.lookup(dir, name.as_bytes()).unwrap().ino;
        let top = make(ROOT_INO, "top", Kind::Directory);
        let sub = make(top, "sub", Kind::Directory);
        let file = make(top, "f", Kind::Regular);
        names.link(file, sub, b"g").unwrap();
        let mode = CloneMode::New;
        trees.clone_entry(&root, top, ROOT_INO, b"c", mode).unwrap();
        let (c, sub) = (find(ROOT_INO, "c"), find(find(ROOT_INO, "c"), "sub"));
        let inode = names.joins.namespace.dir(c).unwrap();
        names.joins.begin(&inode).unwrap();

        assert!(is_no_space(trees.remove_tree(&root, c, b"sub")));
        let copied = trees.clone_entry(&root, sub, ROOT_INO, b"copy", mode);
        assert!(is_no_space(copied));
        let (from, to) = ((c, &b"sub"[..]), (ROOT_INO, &b"moved"[..]));
        let moved = names.rename(from, to, RenameMode::NoReplace, None);
        assert!(is_no_space(moved));

        names.unlink(sub, b"g").unwrap();
        names.rmdir(c, b"sub").unwrap();
        names.unlink(c, b"f").unwrap();
        names.rmdir(ROOT_INO, b"c").unwrap();
        make(ROOT_INO, "c", Kind::Directory);
        assert_eq!(volume.controls().check().unwrap(), []);
        names.joins.finish_joins().unwrap();
        volume.close().unwrap();
    }

    /// Pairs of names in the trees of [`joined_in_part`].
    const FILES: usize = 3;

    fn new_volume() -> Arc<Volume> {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        Volume::open(device, OpenOptions::default()).unwrap()
    }

    fn find(volume: &Volume, path: &str) -> Ino {
        let names = path.split('/');
        names.fold(ROOT_INO, |dir, name| {
            volume.names().lookup(dir, name.as_bytes()).unwrap().ino
        })
    }

    fn clone(volume: &Volume, from: &str, dir: &str, name: &str) -> Ino {
        let (source, dir) = (find(volume, from), find(volume, dir));
        let (root, mode) = (Caller::root(), CloneMode::New);
        let trees = volume.trees();
        let cloned = trees.clone_entry(&root, source, dir, name.as_bytes(), mode);
        cloned.unwrap();
        volume.names().lookup(dir, name.as_bytes()).unwrap().ino
    }

    /// Moves one shared inode of the clone root at `path` out, as a join does that is cut then.
    fn begin_to_join(volume: &Volume, path: &str) {
        let joins = &volume.names().joins;
        let inode = joins.namespace.dir(find(volume, path)).unwrap();
        let _links = joins.namespace.links.write();
        joins.begin(&inode).unwrap();
        let outer = {
            let topology = joins.namespace.topology.read();
            topology.clone_root(&joins.namespace.parent(&inode))
        };
        let (mut moving, _) = joins.moving(&inode).unwrap();
        let last = moving.split_off(moving.len() - 1);
        joins.move_part(&inode, &outer.unwrap(), &last).unwrap();
    }

    /// A volume with a directory `w/a`, of files `fN` with second names `sub/gN`, and its clone `w/c`.
    fn with_clone() -> Arc<Volume> {
        let volume = new_volume();
        let names = volume.names();
        let make = |dir, name: &str, kind| {
            let new = NewInode::new(kind, 0o755);
            names.create(dir, name.as_bytes(), &new).unwrap().ino
        };
        let a = make(make(ROOT_INO, "w", Kind::Directory), "a", Kind::Directory);
        let sub = make(a, "sub", Kind::Directory);
        for number in 0..FILES {
            let file = make(a, &format!("f{number}"), Kind::Regular);
            let name = format!("g{number}");
            names.link(file, sub, name.as_bytes()).unwrap();
        }
        clone(&volume, "w/a", "w", "c");
        volume
    }

    /// The same, while the clone is joined in part.
    fn joined_in_part() -> Arc<Volume> {
        let volume = with_clone();
        begin_to_join(&volume, "w/c");
        volume
    }

    /// The paths that differ between two directories.
    fn differing(volume: &Volume, a: &str, b: &str) -> Vec<String> {
        let (a, b) = (find(volume, a), find(volume, b));
        let found = volume.controls().diff(a, b).unwrap().into_iter();
        found
            .map(|one| String::from_utf8(one.path).unwrap())
            .collect()
    }

    /// Numbers of new files and of links in the stream of a directory.
    fn sent(volume: &Volume, path: &str, base: Option<(&str, &str)>) -> (usize, usize) {
        let state = ControlState::default();
        let ask = |dir, request| {
            let (controls, snapshots) = (volume.controls(), volume.snapshots());
            controls.send(&state, snapshots, (dir, &request)).unwrap()
        };
        let add = SendRequest::Add {
            session: 1,
            begins: true,
            root: 0,
            name: b"t".to_vec(),
            at: None,
            base: base.map(|(snapshot, path)| (snapshot.to_owned(), path.into())),
        };
        ask(find(volume, path), add);
        let (mut section, mut files, mut links) = (Vec::new(), 0, 0);
        loop {
            let next = SendRequest::Next { session: 1 };
            let page = SendPage::decode(&ask(ROOT_INO, next)).unwrap();
            section.extend(page.items);
            if page.ends_section {
                let mut items = StreamItems::new(&section);
                while let Some(item) = items.next_item().unwrap() {
                    let is_file = matches!(
                        item,
                        StreamItem::Make {
                            object: NewObject::File(_),
                            ..
                        }
                    );
                    files += usize::from(is_file);
                    links += usize::from(matches!(item, StreamItem::Link { .. }));
                }
                section.clear();
            }
            if page.ends_stream {
                return (files, links);
            }
        }
    }

    #[test]
    fn comparison_and_stream_see_the_files_of_a_clone_root_that_is_joined_in_part() {
        let volume = joined_in_part();
        for (a, b) in [("w/a", "w/c"), ("w/c", "w/a"), ("w/a/sub", "w/c/sub")] {
            assert!(differing(&volume, a, b).is_empty(), "{a} {b}");
        }
        assert_eq!(sent(&volume, "w/c", None), (FILES, FILES));
        assert_eq!(sent(&volume, "w/c/sub", None), (FILES, 0));
        // The clone is sent as one, and the file that has moved again.
        assert_eq!(sent(&volume, "w", None), (FILES + 1, FILES + 1));
        volume.snapshots().create("s").unwrap();
        assert_eq!(sent(&volume, "w/c", Some(("s", "w/c"))), (0, 0));
        // The last one has moved.
        for number in 0..FILES {
            let file = find(&volume, &format!("w/c/f{number}"));
            volume.files().write(file, 0, b"changed", None).unwrap();
        }
        let changed = ["f0", "f1", "f2", "sub/g0", "sub/g1", "sub/g2"];
        assert_eq!(differing(&volume, "w/a", "w/c"), changed);
        assert_eq!(differing(&volume, "w/c/sub", "w/a/sub"), ["g0", "g1", "g2"]);
        assert_eq!(sent(&volume, "w/c", Some(("s", "w/c"))), (0, 0));
        volume.close().unwrap();
    }

    #[test]
    fn names_of_a_clone_root_in_another_one_that_is_joined_in_part_lead_to_their_files() {
        let volume = with_clone();
        let names = volume.names();
        let create = names.create(ROOT_INO, b"x", &NewInode::new(Kind::Directory, 0o755));
        create.unwrap();
        clone(&volume, "w", "x", "o");
        let last = format!("x/o/c/f{}", FILES - 1);
        let ino = find(&volume, &last);
        begin_to_join(&volume, "x/o/c");
        assert_eq!(find(&volume, &last), ino);
        begin_to_join(&volume, "x/o");
        // The file has moved twice.
        assert_eq!(find(&volume, &last), ino);
        assert_eq!(find(&volume, &last.replace('f', "sub/g")), ino);
        let inode = names.joins.namespace.dir(find(&volume, "x/o/c")).unwrap();
        assert!(inode.is_joining.load(Ordering::SeqCst));
        for path in ["", "/c", "/c/sub"] {
            let (one, two) = (format!("w{path}"), format!("x/o{path}"));
            assert!(differing(&volume, &one, &two).is_empty(), "{path}");
        }
        assert_eq!(sent(&volume, "x/o/c", None), (FILES, FILES));
        assert_eq!(sent(&volume, "x/o", None), (FILES + 1, FILES + 1));
        names.joins.finish_joins().unwrap();
        assert_eq!(find(&volume, &last), ino);
        assert_eq!(volume.controls().check().unwrap(), []);
        volume.close().unwrap();
    }

    #[test]
    fn files_of_a_clone_root_that_is_joined_in_part_come_back_from_a_snapshot() {
        let volume = joined_in_part();
        volume.snapshots().create("s").unwrap();
        let restore = |path: &str, name: &str| {
            let from = (volume.snapshots(), "s", path.as_bytes());
            let to = (ROOT_INO, name.as_bytes());
            let trees = volume.trees();
            trees.restore(&Caller::root(), from, to, CloneMode::New)
        };
        restore("w/c/f2", "f").unwrap();
        restore("w/c/sub/g1", "g").unwrap();
        restore("w", "all").unwrap();
        for path in ["w/c", "w/c/sub"] {
            assert!(is_no_space(restore(path, "no")), "{path}");
        }
        assert!(differing(&volume, "w", "all").is_empty());
        assert_eq!(volume.controls().check().unwrap(), []);
        volume.close().unwrap();
    }
}
