//! Reading directories.
//!
//! Entries come in the order of their names, straight from a scan, so a directory may be of any
//! size. A cookie is a position in one open stream: its entries are numbered as they are handed out, and the
//! stream remembers the names of the last ones, and of every so-many-th before. Going on after a
//! remembered cookie means scanning from that name, whatever was created or removed since. An
//! older cookie is found by scanning from the nearest remembered name before it.
//!
//! Whoever reads a directory asks once more behind its last entry, to hear that there is none. That question is answered without
//! a scan, the first time: what was created since may be shown or not (POSIX, readdir).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use ramet_betree::successor_of_prefix;

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::record::{Entry, Kind};
use crate::namespace::inode::{Count, Ino, Inode};
use crate::ops::lookup::Attr;
use crate::tools::control::DiffPages;
use crate::tools::scrub::Scrubbing;
use crate::volume::Volume;

/// Cookie after `.`.
const AFTER_DOT: u64 = 1;
/// Cookie after `..`, before the first entry.
const AFTER_DOTS: u64 = 2;
/// Names of the last entries that are remembered.
const RECENT: usize = 8192;
/// Of the others, each so-many-th is.
const MARK_EVERY: u64 = 512;

/// One entry, as `getdents` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// Inode number.
    pub ino: Ino,
    /// What it is.
    pub kind: Kind,
    /// Its name.
    pub name: Bytes,
    /// Pass it to go on after this entry.
    pub cookie: u64,
}

#[derive(Default)]
struct Positions {
    recent: VecDeque<Bytes>,
    /// Cookie of the last of `recent`; those before it count down.
    last: u64,
    marks: BTreeMap<u64, Bytes>,
    /// Cookie of the last entry, when the one who reads got it and will ask once more.
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

/// What a directory has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inside {
    Nothing,
    /// No entries, but deleted entries.
    OnlyDeleted,
    Entries,
}

impl Inside {
    pub(crate) fn of(count: Count) -> Self {
        match count {
            Count { entries: 1.., .. } => Self::Entries,
            Count { deleted: 1.., .. } => Self::OnlyDeleted,
            Count { .. } => Self::Nothing,
        }
    }
}

/// An open directory.
pub struct DirStream {
    dir: Arc<Inode>,
    positions: Mutex<Positions>,
    /// A comparison that is being handed out.
    diff: Mutex<Option<DiffPages>>,
    /// A scrub under way.
    pub(crate) scrub: Mutex<Option<Scrubbing>>,
}

impl DirStream {
    /// The directory it is of.
    #[must_use]
    pub fn ino(&self) -> Ino {
        self.dir.ino
    }
}

impl Volume {
    /// Answers [`DIFF`](crate::tools::control::DIFF) on an open directory: compares it with `other`, or goes on with the
    /// comparison.
    ///
    /// # Errors
    /// Those of [`Volume::diff`]; `Invalid` when there is none to go on with.
    pub fn diff_page(&self, stream: &DirStream, other: Option<Ino>) -> Result<Vec<u8>> {
        let started = other.map(|other| self.diff(stream.ino(), other));
        let started = started.transpose()?;
        let mut pages = stream.diff.lock();
        if let Some(found) = started {
            *pages = Some(DiffPages::new(&found));
        }
        let going = pages.as_mut();
        let going = going.ok_or(Error::Invalid("no comparison to go on with"))?;
        let page = going.next_page();
        if going.is_done() {
            *pages = None;
        }
        Ok(page)
    }

    /// Opens a directory for reading its entries.
    ///
    /// # Errors
    /// `NotDirectory`, `Stale`.
    pub fn open_dir(&self, ino: Ino) -> Result<DirStream> {
        Ok(DirStream {
            dir: self.dir(ino)?,
            positions: Mutex::default(),
            diff: Mutex::default(),
            scrub: Mutex::default(),
        })
    }

    /// Hands the entries after `cookie` (0: from the start) to `each`, which says whether it took the
    /// one it got; the first that it refuses comes again when asked to go on after the one before.
    ///
    /// # Errors
    /// Those of the tree. What `each` took before stays taken.
    pub fn read_dir(
        &self,
        stream: &DirStream,
        cookie: u64,
        mut each: impl FnMut(&DirEntry) -> bool,
    ) -> Result<()> {
        self.stream(stream, cookie, |entry, _| Ok(each(entry)))
    }

    /// The same with attributes. Each entry that was taken, other than `.` and `..`, counts as a lookup.
    ///
    /// # Errors
    /// Those of the tree. What `each` took before stays taken.
    pub fn read_dir_plus(
        &self,
        stream: &DirStream,
        cookie: u64,
        mut each: impl FnMut(&DirEntry, &Attr) -> bool,
    ) -> Result<()> {
        let all = |_: &DirEntry| true;
        let each = |entry: &_, attr: Option<&_>| attr.is_some_and(|attr| each(entry, attr));
        self.read_dir_choosing(stream, cookie, all, each, |_| {})
    }

    /// The same with the attributes of those entries that `wants` says, which alone count as lookups; the others cost as much as without.
    /// `first` gets the attributes of each of those that nobody knew by lookups before, and that was taken, before another lookup of it can succeed.
    ///
    /// # Errors
    /// Those of the tree. What `each` took before stays taken.
    pub fn read_dir_choosing(
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
            let attr = self.attr(&inode)?;
            let taken = each(entry, Some(&attr));
            if taken && entry.cookie > AFTER_DOTS {
                self.table.remember_noting(&inode, || first(&attr));
            }
            Ok(taken)
        })
    }

    fn stream(
        &self,
        stream: &DirStream,
        cookie: u64,
        each: impl FnMut(&DirEntry, &mut dyn FnMut() -> Result<Arc<Inode>>) -> Result<bool>,
    ) -> Result<()> {
        let mut deleted = Vec::new();
        let read = self.stream_noting(stream, cookie, each, &mut deleted);
        if !self.is_read_only {
            self.reap_unknown(&stream.dir, deleted);
        }
        read
    }

    /// The same, and notes names and numbers of deleted entries.
    fn stream_noting(
        &self,
        stream: &DirStream,
        cookie: u64,
        mut each: impl FnMut(&DirEntry, &mut dyn FnMut() -> Result<Arc<Inode>>) -> Result<bool>,
        deleted: &mut Vec<(Bytes, Ino)>,
    ) -> Result<()> {
        let dir = &stream.dir;
        let dots: [(u64, &'static [u8], Arc<Inode>); 2] = [
            (AFTER_DOT, b".", Arc::clone(dir)),
            (AFTER_DOTS, b"..", self.parent(dir)),
        ];
        for (at, name, inode) in dots {
            let entry = DirEntry {
                ino: inode.ino,
                kind: Kind::Directory,
                name: Bytes::from_static(name),
                cookie: at,
            };
            if cookie < at && !each(&entry, &mut || Ok(Arc::clone(&inode)))? {
                return Ok(());
            }
        }
        let mut positions = stream.positions.lock();
        if positions.end.take().is_some_and(|end| end == cookie) {
            return Ok(());
        }
        let _names = dir.names.read();
        let view = match self.view(dir) {
            Ok(view) => view,
            Err(crate::Error::NotFound) => return Ok(()),
            Err(other) => return Err(other),
        };
        self.read_now(dir);
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
            // Whoever comes back reads the directory to its end.
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
                let (stored, kind) = match &decoded {
                    Entry::Inode { record, stored } => (
                        *stored,
                        Kind::from_mode(record.mode).expect("the decoder checked the mode"),
                    ),
                    Entry::Link(link_entry) => (link_entry.stored, link_entry.kind),
                    Entry::Deleted(_) => continue,
                };
                let entry = DirEntry {
                    ino: Ino(stored ^ view.dir.acc),
                    kind,
                    name: name.clone(),
                    cookie: at,
                };
                let mut decoded = Some(decoded);
                let mut inode = || {
                    let decoded = decoded
                        .take()
                        .ok_or(crate::Error::Invalid("entry resolved twice"))?;
                    self.resolve(&view, dir, &name, decoded)
                };
                match each(&entry, &mut inode) {
                    Ok(true) => {}
                    Ok(false) => return Ok(()),
                    Err(error) => return Err(error),
                }
            }
            positions.push(at, name);
        }
        // Told already if nothing came now: the next question looks again.
        positions.end = (at > cookie).then_some(at);
        if is_from_start {
            dir.counted(Count {
                entries: at - AFTER_DOTS,
                deleted: deleted.len() as u64,
            });
        }
        Ok(())
    }

    /// What a directory has whose names are locked.
    pub(crate) fn inside(&self, dir: &Arc<Inode>) -> Result<Inside> {
        let view = self.view(dir)?;
        let lo = keys::entries(&view.dir.path);
        let hi = successor_of_prefix(&lo);
        let mut scan = view.snapshot.scan(&lo, hi.as_deref());
        let mut inside = Inside::Nothing;
        while scan.advance()? {
            if !Entry::is_deleted(scan.value()) {
                return Ok(Inside::Entries);
            }
            inside = Inside::OnlyDeleted;
        }
        Ok(inside)
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
