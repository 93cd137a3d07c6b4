//! Reading directories.
//!
//! Names come in the order of their slots, and a cookie names a slot (`cookies.rs`), so a stream
//! needs no memory: it goes on after any name, also one that is gone, and after the directory was
//! forgotten or the volume mounted again. A name that stays is told once, however many others come
//! and go.
//!
//! Records lie in the order of names. The entries of a directory without a slot index, which never
//! had many names, are read whole, and sorted by slot; those that the reader did not take are
//! remembered until the directory or the topology changes (`streams.rs`). In other directories the
//! index tells the names of a *window* of slots, and the entries of a window are read in the order
//! of names.
//!
//! A reader of a directory asks once more behind the last entry, to hear that there is none. The
//! first such question is answered without a scan, if the directory did not change.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use ramet_betree::{Scan, successor_of_prefix};

use crate::error::{Error, Result};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::record::{DeletedEntry, Entry, Kind};
use crate::format::slots::Slot;
use crate::namespace::attr::Attr;
use crate::namespace::inode::{Count, Inode};
use crate::namespace::known_below::{KnownBelow, known_below};
use crate::namespace::link_counts;
use crate::namespace::resolve::{Namespace, View, rollbacks_of};
use crate::ops::cookies::{AFTER_DOT, AFTER_DOTS, Bound, place};
use crate::ops::deferred_delete::DeferredDeletes;
use crate::ops::streams::{Item, Rest, Streams};
use crate::ops::times::Times;

/// Names of the first window of a request, and of further ones.
const WINDOW_LEN: usize = 128;
const NEXT_WINDOW_LEN: usize = 512;
/// Entries between two wanted ones that a scan reads rather than to begin anew.
const SKIPPED_MAX: usize = 32;
/// One entry, as `getdents` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// Inode number.
    pub ino: Ino,
    /// Kind of the object.
    pub kind: Kind,
    /// The name.
    pub name: Bytes,
    /// A reader passes it to go on after this entry.
    pub cookie: u64,
}

/// Gives the inode of the entry that a reader got, at most once.
type Resolve<'a> = &'a mut dyn FnMut() -> Result<Arc<Inode>>;

/// Directories and their entries.
pub struct Directories {
    namespace: Arc<Namespace>,
    times: Arc<Times>,
    deletes: Arc<DeferredDeletes>,
    streams: Streams,
}

impl Directories {
    pub(crate) fn new(
        namespace: &Arc<Namespace>,
        times: &Arc<Times>,
        deletes: &Arc<DeferredDeletes>,
    ) -> Self {
        Self {
            namespace: Arc::clone(namespace),
            times: Arc::clone(times),
            deletes: Arc::clone(deletes),
            streams: Streams::default(),
        }
    }

    /// Hands the entries of a directory after `cookie` (0: from the start) to `each`, which says
    /// whether it took its entry. The first entry that it refuses comes again when the caller goes
    /// on after the entry before. A directory that was removed has `.` and `..` alone.
    ///
    /// # Errors
    /// `NotDirectory`, `Stale`, and those of the tree. Entries that `each` took before stay taken.
    pub fn read(
        &self,
        dir: Ino,
        cookie: u64,
        mut each: impl FnMut(&DirEntry) -> bool,
    ) -> Result<()> {
        self.stream(dir, cookie, |entry, _| Ok(each(entry)))
    }

    /// As [`Directories::read`], with attributes. Each entry that was taken, other than `.` and
    /// `..`, counts as a lookup.
    ///
    /// # Errors
    /// Those of [`Directories::read`].
    pub fn read_plus(
        &self,
        dir: Ino,
        cookie: u64,
        mut each: impl FnMut(&DirEntry, &Attr) -> bool,
    ) -> Result<()> {
        let all = |_: &DirEntry| true;
        let each = |entry: &_, attr: Option<&_>| attr.is_some_and(|attr| each(entry, attr));
        self.read_choosing(dir, cookie, all, each, |_| {})
    }

    /// As [`Directories::read_plus`], with the attributes of the entries that `wants` chooses.
    /// Those alone count as lookups, and the others cost as much as without attributes. `first`
    /// gets the attributes of each inode that was taken and had no reference before. It runs before
    /// another lookup of that inode can succeed.
    ///
    /// # Errors
    /// Those of [`Directories::read`].
    pub fn read_choosing(
        &self,
        dir: Ino,
        cookie: u64,
        mut wants: impl FnMut(&DirEntry) -> bool,
        mut each: impl FnMut(&DirEntry, Option<&Attr>) -> bool,
        mut first: impl FnMut(&Attr),
    ) -> Result<()> {
        self.stream(dir, cookie, |entry, inode| {
            if !wants(entry) {
                return Ok(each(entry, None));
            }
            let inode = inode()?;
            let attr = link_counts::attr(&self.namespace, &inode)?;
            let taken = each(entry, Some(&attr));
            if taken && entry.cookie > AFTER_DOTS {
                let table = &self.namespace.table;
                table.remember_noting(&inode, || first(&attr));
            }
            Ok(taken)
        })
    }

    /// Whether a directory was removed, itself or with a tree, and is still known.
    #[must_use]
    pub fn is_gone(&self, dir: Ino) -> bool {
        let table = &self.namespace.table;
        let known = table.get(dir);
        let known = known.or_else(|| table.compact_at(dir).map(|(parent, _)| parent));
        known.is_some_and(|dir| self.namespace.topology.read().dir_path(&dir).is_err())
    }

    fn stream(
        &self,
        dir: Ino,
        cookie: u64,
        mut each: impl FnMut(&DirEntry, Resolve<'_>) -> Result<bool>,
    ) -> Result<()> {
        let _reaped = self.deletes.reap_on_drop();
        let known = self.namespace.dir(dir)?;
        if !self.dots(&known, cookie, &mut each)? {
            return Ok(());
        }
        loop {
            let rollbacks = rollbacks_of(&self.namespace);
            let dir = self.namespace.dir(dir)?;
            let mut deleted = Vec::new();
            let read = self.names(&dir, cookie, &mut each, &mut deleted);
            self.deletes.note_unknown(&dir, deleted);
            // The root of before a rollback is gone, and another directory has its number.
            if read? || rollbacks == rollbacks_of(&self.namespace) {
                return Ok(());
            }
        }
    }

    /// Hands out `.` and `..`. Tells whether `each` goes on.
    fn dots(
        &self,
        dir: &Arc<Inode>,
        cookie: u64,
        mut each: impl FnMut(&DirEntry, Resolve<'_>) -> Result<bool>,
    ) -> Result<bool> {
        let dots: [(u64, &'static [u8], Arc<Inode>); 2] = [
            (AFTER_DOT, b".", Arc::clone(dir)),
            (AFTER_DOTS, b"..", self.namespace.parent(dir)),
        ];
        for (at, name, inode) in dots {
            let entry = DirEntry {
                ino: inode.ino,
                kind: Kind::Directory,
                name: Bytes::from_static(name),
                cookie: at,
            };
            if cookie < at && !each(&entry, &mut || Ok(Arc::clone(&inode)))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Hands out the names, and notes deleted entries. Tells whether the directory is there.
    fn names(
        &self,
        dir: &Arc<Inode>,
        cookie: u64,
        each: impl FnMut(&DirEntry, Resolve<'_>) -> Result<bool>,
        deleted: &mut Vec<(Bytes, DeletedEntry)>,
    ) -> Result<bool> {
        let rest = self.streams.take(dir, cookie);
        let _names = dir.names.read();
        let changes = dir.changes.load(Ordering::Relaxed);
        let rest = rest.filter(|rest| rest.changes == changes);
        if rest.as_ref().is_some_and(|rest| rest.items.is_empty()) {
            return Ok(true);
        }
        let view = match self.namespace.view(dir) {
            Ok(view) => view,
            Err(Error::NotFound) => return Ok(false),
            Err(other) => return Err(other),
        };
        let rest = rest.filter(|rest| rest.generation == view.generation);
        self.times.read_now(dir);
        let (next_slot, has_index) = {
            let record = dir.state.read();
            (record.next_slot, record.has_slot_index())
        };
        let (bound, from) = place(cookie).unwrap_or((Bound::of(next_slot), Slot(0)));
        let mut listing = Listing {
            directories: self,
            dir,
            view,
            bound,
            deleted,
            each,
            last: None,
        };
        let rest = if !has_index {
            let mut rest = match rest {
                Some(rest) => rest,
                None => listing.whole(from, changes)?,
            };
            listing.view.seen = rest.seen;
            let is_done = listing.hand_out(&mut rest.items)?;
            if !is_done {
                listing.last.get_or_insert(cookie.max(AFTER_DOTS));
            }
            Some(rest)
        } else {
            let is_done = listing.windows(from, cookie > AFTER_DOTS)?;
            is_done.then(|| Rest::end(changes))
        };
        // The end was told already if no entry came now: the next question looks again.
        if let (Some(last), Some(rest)) = (listing.last, rest) {
            self.streams.keep(dir, last, rest);
        }
        Ok(true)
    }

    /// The objects below the directory `top` that the caller may have references to. The search
    /// takes some 100 ns for each inode in memory; it calls `between` now and then, to pause.
    #[must_use]
    pub fn known_below(&self, top: Ino, between: impl FnMut()) -> KnownBelow {
        let table = &self.namespace.table;
        let top = table.get(top);
        top.map_or_else(KnownBelow::default, |top| known_below(table, &top, between))
    }

    /// Calls `each` with the names of hard links in a directory that the caller has a reference to,
    /// also in one that was removed, until the answer is false.
    ///
    /// # Errors
    /// Those of the tree.
    pub fn each_link(&self, dir: Ino, mut each: impl FnMut(&[u8]) -> bool) -> Result<()> {
        let table = &self.namespace.table;
        let (above, name) = match (table.get(dir), table.compact_at(dir)) {
            (Some(dir), _) => (dir, None),
            (None, Some((parent, name))) => (parent, Some(name)),
            (None, None) => return Ok(()),
        };
        let path = match self.namespace.topology.read().kept_dir_path(&above) {
            Err(Error::Stale) => return Ok(()),
            path => path?.path,
        };
        let path = name.map_or(path.clone(), |name| keys::child(&path, &name));
        let entries = keys::entries(&path);
        let hi = successor_of_prefix(&entries);
        let mut scan = self.namespace.tree.scan(&entries, hi.as_deref());
        while scan.advance()? {
            let is_link = matches!(Entry::decode(&scan.value_bytes())?, Entry::Link(_));
            if is_link && !each(&scan.key()[entries.len()..]) {
                break;
            }
        }
        Ok(())
    }
}

/// Names of one request on their way to the reader.
struct Listing<'a, E> {
    directories: &'a Directories,
    dir: &'a Arc<Inode>,
    view: View,
    bound: Bound,
    deleted: &'a mut Vec<(Bytes, DeletedEntry)>,
    each: E,
    /// Cookie of the last name that was taken.
    last: Option<u64>,
}

impl<E: FnMut(&DirEntry, Resolve<'_>) -> Result<bool>> Listing<'_, E> {
    /// Reads all entries of the directory. Gives those from a slot on, and notes the others that
    /// are deleted.
    fn whole(&mut self, from: Slot, changes: u64) -> Result<Rest> {
        let entries = keys::entries(&self.view.dir.path);
        let hi = successor_of_prefix(&entries);
        let mut scan = self.view.snapshot.scan(&entries, hi.as_deref());
        if from.0 > 0 {
            // A reader that comes back reads the directory to its end.
            scan = scan.eager();
        }
        let mut items = Vec::new();
        let mut count = 0;
        while scan.advance()? {
            let name = Bytes::copy_from_slice(&scan.key()[entries.len()..]);
            count += u64::from(self.add(&mut items, name, from, &scan)?);
        }
        self.dir.counted(Count {
            entries: count,
            deleted: self.deleted.len() as u64,
        });
        items.sort_unstable_by_key(|item| std::cmp::Reverse(item.slot));
        Ok(Rest {
            changes,
            generation: self.view.generation,
            seen: self.view.seen,
            items,
        })
    }

    /// Adds the entry that a scan is at, if it has a slot of the stream from `from` on. Tells
    /// whether it is a name.
    fn add(&mut self, items: &mut Vec<Item>, name: Bytes, from: Slot, scan: &Scan) -> Result<bool> {
        if Entry::is_deleted(scan.value()) {
            if let Entry::Deleted(found) = Entry::decode(&scan.value_bytes())? {
                self.deleted.push((name, found));
            }
            return Ok(false);
        }
        let slot = Entry::slot_of(scan.value())?;
        if slot >= from && slot.0 < self.bound.0 {
            let value = scan.value_bytes();
            items.push(Item { slot, name, value });
        }
        Ok(true)
    }

    /// Hands out entries from the end on, and removes those that were taken. Tells whether all
    /// were.
    fn hand_out(&mut self, items: &mut Vec<Item>) -> Result<bool> {
        while let Some(item) = items.last() {
            let decoded = Entry::decode(&item.value)?;
            let entry = self.entry(&decoded, item)?;
            let mut decoded = Some(decoded);
            let (namespace, view, dir) = (&self.directories.namespace, &self.view, self.dir);
            let mut inode = || {
                let decoded = decoded.take();
                let decoded = decoded.ok_or(Error::Invalid("entry resolved twice"))?;
                namespace.resolve(view, dir, &item.name, decoded)
            };
            if !(self.each)(&entry, &mut inode)? {
                return Ok(false);
            }
            self.last = Some(entry.cookie);
            items.pop();
        }
        Ok(true)
    }

    /// A name of the directory, as `getdents` shows it.
    fn entry(&self, decoded: &Entry, item: &Item) -> Result<DirEntry> {
        let namespace = &self.directories.namespace;
        let (ino, kind) = match decoded {
            Entry::Inode(record) => {
                let identity = namespace.numbers.identity(self.dir, record)?;
                (identity.ino, record.kind())
            }
            Entry::Link(link) => (namespace.link_ino(&self.view, link)?, link.kind),
            Entry::Deleted(_) => return Err(Error::Stale),
        };
        Ok(DirEntry {
            ino,
            kind,
            name: item.name.clone(),
            cookie: self.bound.cookie(item.slot),
        })
    }

    /// Hands out the names from a slot on, window by window. Tells whether all were taken.
    fn windows(&mut self, mut from: Slot, mut goes_on: bool) -> Result<bool> {
        let prefix = keys::slots(&self.view.dir.path);
        loop {
            let lo = keys::slot(&self.view.dir.path, from);
            let hi = keys::slot(&self.view.dir.path, Slot(self.bound.0));
            if lo >= hi {
                return Ok(true);
            }
            let len = if goes_on { NEXT_WINDOW_LEN } else { WINDOW_LEN };
            let mut names = Vec::new();
            let mut slots = self.view.snapshot.scan(&lo, Some(&hi));
            if goes_on {
                slots = slots.eager();
            }
            while names.len() < len && slots.advance()? {
                let slot = keys::parse_slot(&slots.key()[prefix.len()..]);
                from = Slot(slot.ok_or_else(|| bad_slot(slots.key()))?.0 + 1);
                names.push(Bytes::copy_from_slice(slots.value()));
            }
            let is_last = names.len() < len;
            names.sort_unstable();
            let mut items = self.read_names(names)?;
            if !self.hand_out(&mut items)? {
                return Ok(false);
            }
            if is_last {
                return Ok(true);
            }
            goes_on = true;
        }
    }

    /// Reads the entries of some names, which are sorted. Gives them by slot, the first one last.
    fn read_names(&mut self, names: Vec<Bytes>) -> Result<Vec<Item>> {
        let entries = keys::entries(&self.view.dir.path);
        let hi = successor_of_prefix(&entries);
        let begin = |view: &View, name: &[u8]| {
            let lo = keys::entry(&view.dir.path, name);
            view.snapshot.scan(&lo, hi.as_deref())
        };
        let mut items = Vec::with_capacity(names.len());
        let mut scan: Option<Scan> = None;
        for name in names {
            let mut at = match scan.take() {
                Some(scan) => scan,
                None => {
                    let mut scan = begin(&self.view, &name);
                    if !scan.advance()? {
                        continue;
                    }
                    scan
                }
            };
            let mut skipped = 0;
            let mut is_there = true;
            while is_there && at.key()[entries.len()..] < name[..] {
                skipped += 1;
                if skipped > SKIPPED_MAX {
                    at = begin(&self.view, &name);
                }
                is_there = at.advance()?;
            }
            if !is_there {
                break;
            }
            if at.key()[entries.len()..] == name[..] {
                self.add(&mut items, name, Slot(0), &at)?;
            }
            scan = Some(at);
        }
        items.sort_unstable_by_key(|item| std::cmp::Reverse(item.slot));
        Ok(items)
    }
}

fn bad_slot(key: &[u8]) -> Error {
    Error::Corrupt {
        what: "slot of a directory",
        detail: format!("key {key:?}"),
    }
}
