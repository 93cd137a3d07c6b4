//! Entries of directories that readers are about to ask for.
//!
//! A reader of a directory asks several times, and each question is complete: the directory and a
//! cookie. Between two questions the entries that the reader did not take yet are remembered under
//! the cookie with which it will go on. A reader that never comes back costs nothing but its place,
//! which a later one takes over. A question whose entries are not remembered reads the directory.

use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Weak};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::format::slots::Slot;
use crate::namespace::inode::Inode;

/// Streams that are remembered, at most.
const STREAMS: usize = 64;
/// Entries of all streams that are remembered, at most.
const ENTRIES_MAX: usize = 1 << 14;

/// An entry of a directory, as it is stored.
pub(crate) struct Item {
    pub(crate) slot: Slot,
    pub(crate) name: Bytes,
    pub(crate) value: Bytes,
}

/// The entries that are left of a stream.
pub(crate) struct Rest {
    /// Changes of the directory before they were read.
    pub(crate) changes: u64,
    /// Generation of the topology when they were read. A join gives link entries other numbers, and
    /// starts a new one.
    pub(crate) generation: u64,
    /// Evictions of the table before they were read.
    pub(crate) seen: u64,
    /// In the order of slots, the first one last.
    pub(crate) items: Vec<Item>,
}

impl Rest {
    /// The rest of a stream whose reader has got all entries.
    pub(crate) fn end(changes: u64) -> Self {
        Self {
            changes,
            generation: 0,
            seen: 0,
            items: Vec::new(),
        }
    }
}

/// The place of a stream.
struct Place {
    /// The directory. Another inode in memory of the same directory counts its changes anew.
    dir: Weak<Inode>,
    cookie: u64,
    rest: Rest,
}

struct Places {
    places: [Option<Place>; STREAMS],
    /// Entries of all of them.
    entries: usize,
}

/// The streams of a volume.
pub(crate) struct Streams {
    places: Mutex<Places>,
    hasher: RandomState,
}

impl Default for Places {
    fn default() -> Self {
        Self {
            places: [const { None }; STREAMS],
            entries: 0,
        }
    }
}

impl Default for Streams {
    fn default() -> Self {
        Self {
            places: Mutex::default(),
            hasher: RandomState::new(),
        }
    }
}

impl Streams {
    fn place_of(&self, dir: &Arc<Inode>, cookie: u64) -> usize {
        let hash = self.hasher.hash_one((dir.ino.0, cookie));
        usize::try_from(hash % STREAMS as u64).expect("a small number")
    }

    /// Takes the entries of a directory from `cookie` on, if they are remembered.
    pub(crate) fn take(&self, dir: &Arc<Inode>, cookie: u64) -> Option<Rest> {
        let at = self.place_of(dir, cookie);
        let mut places = self.places.lock();
        let is_it = |place: &Place| {
            place.cookie == cookie && std::ptr::eq(place.dir.as_ptr(), Arc::as_ptr(dir))
        };
        places.places[at].as_ref().filter(|place| is_it(place))?;
        let rest = places.places[at].take()?.rest;
        places.entries -= rest.items.len();
        Some(rest)
    }

    /// Remembers the entries of a directory from `cookie` on, if not too many are remembered.
    pub(crate) fn keep(&self, dir: &Arc<Inode>, cookie: u64, rest: Rest) {
        let at = self.place_of(dir, cookie);
        let mut places = self.places.lock();
        let before = places.places[at].take();
        places.entries -= before.as_ref().map_or(0, |place| place.rest.items.len());
        if places.entries + rest.items.len() <= ENTRIES_MAX {
            places.entries += rest.items.len();
            places.places[at] = Some(Place {
                dir: Arc::downgrade(dir),
                cookie,
                rest,
            });
        }
        drop(places);
        drop(before);
    }
}
