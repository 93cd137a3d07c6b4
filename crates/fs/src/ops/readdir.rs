//! Reading directories.
//!
//! Names come in the order of their slots, and a cookie names a slot (`cookies.rs`), so a stream
//! needs no memory: it goes on after any name, also one that is gone, and after the directory was
//! forgotten or the volume mounted again. A name that stays is told once, however many others come
//! and go.
//!
//! Records lie in the order of names. The entries of a directory that never had many names are read
//! whole, and sorted by slot; the stream remembers those that its reader did not take, until the
//! directory changes. In other directories the slots tell the names of a *window* of slots, and the
//! entries of a window are read in the order of names.
//!
//! A reader of a directory asks once more behind the last entry, to hear that there is none. The
//! first such question is answered without a scan: an entry that was created since may be shown or
//! not (POSIX, readdir).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use ramet_betree::{Scan, successor_of_prefix};

use crate::error::{Error, Result};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::record::{DeletedEntry, Entry, Kind};
use crate::format::slots::Slot;
use crate::namespace::attr::Attr;
use crate::namespace::inode::{Count, Inode};
use crate::namespace::link_counts;
use crate::namespace::resolve::{Namespace, View};
use crate::ops::cookies::{AFTER_DOT, AFTER_DOTS, Bound, place};
use crate::ops::deferred_delete::DeferredDeletes;
use crate::ops::times::Times;

/// The entries of a directory that never had more names are read whole.
const WHOLE_SLOTS_MAX: u64 = 1024;
/// Names of the first window of a request, and of further ones.
const WINDOW_LEN: usize = 128;
const NEXT_WINDOW_LEN: usize = 512;
/// Entries between two wanted ones that a scan reads rather than to begin anew.
const SKIPPED_MAX: usize = 32;
/// Entries that all streams together remember.
const REMEMBERED_MAX: usize = 1 << 16;

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

/// An entry of the directory, as it is stored.
struct Item {
    slot: Slot,
    name: Bytes,
    value: Bytes,
}

/// Entries that a reader did not take yet.
struct Rest {
    /// Changes of the directory when they were read.
    changes: u64,
    /// Evictions of the table before they were read.
    seen: u64,
    /// The slot from which on they are all entries of the stream.
    from: Slot,
    /// In the order of slots, the first one last.
    items: Vec<Item>,
}

#[derive(Default)]
struct Position {
    rest: Option<Rest>,
    /// Cookie of the last entry, when the reader has got it and will ask once more.
    end: Option<u64>,
}

/// An open directory.
pub struct DirStream {
    dir: Arc<Inode>,
    position: Mutex<Position>,
    /// Entries that all streams remember.
    remembered: Arc<AtomicUsize>,
}

impl DirStream {
    /// Number of the directory.
    #[must_use]
    pub fn ino(&self) -> Ino {
        self.dir.ino
    }

    /// Remembers entries, if not too many are remembered already.
    fn remember(&self, position: &mut Position, rest: Rest) {
        let len = rest.items.len();
        let before = self.remembered.fetch_add(len, Ordering::Relaxed);
        if len == 0 || before + len > REMEMBERED_MAX {
            self.remembered.fetch_sub(len, Ordering::Relaxed);
            return;
        }
        position.rest = Some(rest);
    }

    /// Takes the entries that are remembered.
    fn take_rest(&self, position: &mut Position) -> Option<Rest> {
        let rest = position.rest.take()?;
        self.remembered
            .fetch_sub(rest.items.len(), Ordering::Relaxed);
        Some(rest)
    }
}

impl Drop for DirStream {
    fn drop(&mut self) {
        let mut position = std::mem::take(self.position.get_mut());
        drop(self.take_rest(&mut position));
    }
}

/// Gives the inode of the entry that a reader got, at most once.
type Resolve<'a> = &'a mut dyn FnMut() -> Result<Arc<Inode>>;

/// Open directories and their entries.
pub struct Directories {
    namespace: Arc<Namespace>,
    times: Arc<Times>,
    deletes: Arc<DeferredDeletes>,
    remembered: Arc<AtomicUsize>,
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
            remembered: Arc::default(),
        }
    }

    /// Opens a directory for reading its entries.
    ///
    /// # Errors
    /// `NotDirectory`, `Stale`.
    pub fn open(&self, ino: Ino) -> Result<DirStream> {
        Ok(DirStream {
            dir: self.namespace.dir(ino)?,
            position: Mutex::default(),
            remembered: Arc::clone(&self.remembered),
        })
    }

    /// Closes a directory. If the stream kept a removed directory, the contents of that are erased.
    pub fn close(&self, stream: Arc<DirStream>) {
        drop(stream);
        self.deletes.reap();
    }

    /// Hands the entries after `cookie` (0: from the start) to `each`, which says whether it took
    /// its entry. The first entry that it refuses comes again when the caller goes on after the
    /// entry before.
    ///
    /// # Errors
    /// Those of the tree. Entries that `each` took before stay taken.
    pub fn read(
        &self,
        stream: &DirStream,
        cookie: u64,
        mut each: impl FnMut(&DirEntry) -> bool,
    ) -> Result<()> {
        self.stream(stream, cookie, |entry, _| Ok(each(entry)))
    }

    /// As [`Directories::read`], with attributes. Each entry that was taken, other than `.` and
    /// `..`, counts as a lookup.
    ///
    /// # Errors
    /// Those of the tree. Entries that `each` took before stay taken.
    pub fn read_plus(
        &self,
        stream: &DirStream,
        cookie: u64,
        mut each: impl FnMut(&DirEntry, &Attr) -> bool,
    ) -> Result<()> {
        let all = |_: &DirEntry| true;
        let each = |entry: &_, attr: Option<&_>| attr.is_some_and(|attr| each(entry, attr));
        self.read_choosing(stream, cookie, all, each, |_| {})
    }

    /// As [`Directories::read_plus`], with the attributes of the entries that `wants` chooses.
    /// Those alone count as lookups, and the others cost as much as without attributes. `first`
    /// gets the attributes of each inode that was taken and had no reference before. It runs before
    /// another lookup of that inode can succeed.
    ///
    /// # Errors
    /// Those of the tree. Entries that `each` took before stay taken.
    pub fn read_choosing(
        &self,
        stream: &DirStream,
        cookie: u64,
        mut wants: impl FnMut(&DirEntry) -> bool,
        mut each: impl FnMut(&DirEntry, Option<&Attr>) -> bool,
        mut first: impl FnMut(&Attr),
    ) -> Result<()> {
        self.stream(stream, cookie, |entry, inode| {
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

    fn stream(
        &self,
        stream: &DirStream,
        cookie: u64,
        mut each: impl FnMut(&DirEntry, Resolve<'_>) -> Result<bool>,
    ) -> Result<()> {
        if !self.dots(&stream.dir, cookie, &mut each)? {
            return Ok(());
        }
        let mut deleted = Vec::new();
        let read = self.names(stream, cookie, each, &mut deleted);
        self.deletes.reap_unknown(&stream.dir, deleted);
        read
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

    /// Hands out the names, and notes deleted entries.
    fn names(
        &self,
        stream: &DirStream,
        cookie: u64,
        each: impl FnMut(&DirEntry, Resolve<'_>) -> Result<bool>,
        deleted: &mut Vec<(Bytes, DeletedEntry)>,
    ) -> Result<()> {
        let dir = &stream.dir;
        let mut position = stream.position.lock();
        let rest = stream.take_rest(&mut position);
        if position.end.take().is_some_and(|end| end == cookie) {
            return Ok(());
        }
        let _names = dir.names.read();
        let view = match self.namespace.view(dir) {
            Ok(view) => view,
            Err(Error::NotFound) => return Ok(()),
            Err(other) => return Err(other),
        };
        self.times.read_now(dir);
        let next_slot = dir.state.read().next_slot;
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
        let is_done = if next_slot <= WHOLE_SLOTS_MAX {
            let changes = dir.changes.load(Ordering::Relaxed);
            let valid = rest.filter(|rest| rest.changes == changes && rest.from == from);
            let mut rest = match valid {
                Some(rest) => rest,
                None => listing.whole(from, changes)?,
            };
            listing.view.seen = rest.seen;
            let is_done = listing.hand_out(&mut rest.items)?;
            if let Some((_, next)) = listing.last.and_then(place) {
                rest.from = next;
            }
            stream.remember(&mut position, rest);
            is_done
        } else {
            listing.windows(from, cookie > AFTER_DOTS)?
        };
        // The end was told already if no entry came now: the next question looks again.
        position.end = listing.last.filter(|_| is_done);
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
            seen: self.view.seen,
            from,
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
