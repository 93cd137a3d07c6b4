//! Reading directories.
//!
//! Entries come in the order of their names, straight from a scan, so a directory may be of any
//! size. A cookie is a position in one open stream. The stream numbers its entries as it hands them
//! out. It remembers the names of the last entries, and of one in [`MARK_EVERY`] before them. A
//! reader that goes on after a remembered cookie gets a scan from that name, independent of
//! creations and removals since. An older cookie is found by a scan from the nearest remembered
//! name before it.
//!
//! A reader of a directory asks once more behind the last entry, to hear that there is none. The
//! first such question is answered without a scan: an entry that was created since may be shown or
//! not (POSIX, readdir).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use ramet_betree::successor_of_prefix;

use crate::error::{Error, Result};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::record::{Entry, Kind};
use crate::namespace::attr::Attr;
use crate::namespace::inode::{Count, Inode};
use crate::namespace::resolve::{Namespace, View};
use crate::ops::deferred_delete::DeferredDeletes;
use crate::ops::times::Times;

/// Cookie after `.`.
const AFTER_DOT: u64 = 1;
/// Cookie after `..`, before the first entry.
const AFTER_DOTS: u64 = 2;
/// Number of last entries whose names a stream remembers.
const RECENT: usize = 8192;
/// The distance between the other names that a stream remembers.
const MARK_EVERY: u64 = 512;

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

#[derive(Default)]
struct Positions {
    recent: VecDeque<Bytes>,
    /// Cookie of the last name of `recent`; the names before it count down.
    last: u64,
    marks: BTreeMap<u64, Bytes>,
    /// Cookie of the last entry, when the reader has got it and will ask once more.
    end: Option<u64>,
}

impl Positions {
    fn push(&mut self, cookie: u64, name: Bytes) {
        if cookie != self.last + 1 {
            self.recent.clear();
        }
        self.last = cookie;
        if cookie.is_multiple_of(MARK_EVERY) {
            self.marks.insert(cookie, name.clone());
        }
        self.recent.push_back(name);
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
    }

    /// The nearest remembered name at or before `cookie`, and its cookie.
    fn find(&self, cookie: u64) -> (u64, Option<Bytes>) {
        let back = self
            .last
            .checked_sub(cookie)
            .and_then(|back| usize::try_from(back).ok());
        let recent = back
            .and_then(|back| self.recent.len().checked_sub(back + 1))
            .and_then(|at| self.recent.get(at));
        if let Some(name) = recent {
            return (cookie, Some(name.clone()));
        }
        match self.marks.range(..=cookie).next_back() {
            Some((&cookie, name)) => (cookie, Some(name.clone())),
            None => (AFTER_DOTS, None),
        }
    }
}

/// An open directory.
pub struct DirStream {
    dir: Arc<Inode>,
    positions: Mutex<Positions>,
}

impl DirStream {
    /// Number of the directory.
    #[must_use]
    pub fn ino(&self) -> Ino {
        self.dir.ino
    }
}

/// Gives the inode of the entry that a reader got, at most once.
type Resolve<'a> = &'a mut dyn FnMut() -> Result<Arc<Inode>>;

/// Open directories and their entries.
pub struct Directories {
    namespace: Arc<Namespace>,
    times: Arc<Times>,
    deletes: Arc<DeferredDeletes>,
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
        }
    }

    /// Opens a directory for reading its entries.
    ///
    /// # Errors
    /// `NotDirectory`, `Stale`.
    pub fn open(&self, ino: Ino) -> Result<DirStream> {
        Ok(DirStream {
            dir: self.namespace.dir(ino)?,
            positions: Mutex::default(),
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
            let attr = inode.attr();
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

    /// Hands out the names, and notes names and numbers of deleted entries.
    fn names(
        &self,
        stream: &DirStream,
        cookie: u64,
        mut each: impl FnMut(&DirEntry, Resolve<'_>) -> Result<bool>,
        deleted: &mut Vec<(Bytes, Ino)>,
    ) -> Result<()> {
        let dir = &stream.dir;
        let mut positions = stream.positions.lock();
        if positions.end.take().is_some_and(|end| end == cookie) {
            return Ok(());
        }
        let _names = dir.names.read();
        let view = match self.namespace.view(dir) {
            Ok(view) => view,
            Err(Error::NotFound) => return Ok(()),
            Err(other) => return Err(other),
        };
        self.times.read_now(dir);
        let entries = keys::entries(&view.dir.path);
        let (mut at, name) = positions.find(cookie.max(AFTER_DOTS));
        let is_from_start = name.is_none();
        let mut lo = entries.to_vec();
        if let Some(name) = name {
            lo.extend_from_slice(&name);
            lo.push(0);
        }
        let hi = successor_of_prefix(&entries);
        let mut scan = view.snapshot.scan(&lo, hi.as_deref());
        if cookie > AFTER_DOTS {
            // A reader that comes back reads the directory to its end.
            scan = scan.eager();
        }
        while scan.advance()? {
            let name = Bytes::copy_from_slice(&scan.key()[entries.len()..]);
            if Entry::is_deleted(scan.value()) {
                if let Entry::Deleted(found) = Entry::decode(&scan.value_bytes())? {
                    deleted.push((name, Ino(found.stored ^ view.dir.acc)));
                }
                continue;
            }
            at += 1;
            if at > cookie {
                let decoded = Entry::decode(&scan.value_bytes())?;
                let entry = dir_entry(&decoded, &view, name.clone(), at);
                let mut decoded = Some(decoded);
                let mut inode = || {
                    let decoded = decoded.take();
                    let decoded = decoded.ok_or(Error::Invalid("entry resolved twice"))?;
                    self.namespace.resolve(&view, dir, &name, decoded)
                };
                if !each(&entry, &mut inode)? {
                    return Ok(());
                }
            }
            positions.push(at, name);
        }
        // The end was told already if no entry came now: the next question looks again.
        positions.end = (at > cookie).then_some(at);
        if is_from_start {
            dir.counted(Count {
                entries: at - AFTER_DOTS,
                deleted: deleted.len() as u64,
            });
        }
        Ok(())
    }
}

/// A name of the directory of `view`, as `getdents` shows it.
fn dir_entry(decoded: &Entry, view: &View, name: Bytes, cookie: u64) -> DirEntry {
    let (stored, kind) = match decoded {
        Entry::Inode { record, stored } => (*stored, record.kind()),
        Entry::Link(link) => (link.stored, link.kind),
        Entry::Deleted(deleted) => (deleted.stored, deleted.kind),
    };
    DirEntry {
        ino: Ino(stored ^ view.dir.acc),
        kind,
        name,
        cookie,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_remember_recent_names_and_marks() {
        let mut positions = Positions::default();
        for cookie in 3..20_000u64 {
            positions.push(cookie, Bytes::from(cookie.to_string()));
        }
        let at = |cookie: u64| (cookie, Some(Bytes::from(cookie.to_string())));
        assert_eq!(positions.find(19_999), at(19_999));
        assert_eq!(positions.find(12_000), at(12_000));
        assert_eq!(positions.find(5000), at(4608));
        assert_eq!(positions.find(100), (AFTER_DOTS, None));
        positions.push(3, Bytes::from_static(b"3"));
        assert_eq!(positions.find(3), at(3));
        assert_eq!(positions.find(19_999), at(19_968));
    }
}
