//! The check of slots and inode numbers: F5, F9 for generations, and F13 to F15 of `check.rs`.
//!
//! The check gives each inode the number that a lookup would show, from the root on downwards. Names
//! that were never shown have none. The tables tell of directories by their identities only, so the
//! check finds out which of them are there, which wait for their reclaim, and which are lost.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use bytes::Bytes;

use crate::format::ino::{Identity, Ino, ROOT_INO};
use crate::format::keys;
use crate::format::record::Record;
use crate::format::slots::{RUN_LENS, SLOTS_WITHOUT_INDEX, Slot};
use crate::namespace::numbers::{Counters, FIRST_NUMBER};
use crate::tools::check::{Findings, Scan};

impl Scan {
    /// F13.
    pub(super) fn compare_slots(&self, findings: &mut Findings) {
        let mut left = self.slots.clone();
        let mut taken = HashSet::new();
        let named = self
            .objects
            .iter()
            .filter(|(path, object)| !object.is_shared && !path.is_empty());
        let named = named.map(|(path, object)| (path, &object.home, object.record.slot));
        let links = self
            .links
            .iter()
            .map(|(path, dir, link)| (path, dir, link.slot));
        let deleted = self.deleted.iter();
        let deleted = deleted.map(|(path, (dir, deleted))| (path, dir, deleted.slot));
        for (path, dir, slot) in named.chain(links).chain(deleted) {
            let name = path.slice(dir.len() + 2..);
            if !taken.insert((dir, slot)) {
                let detail = format!("slot {} of {path:?} is that of another entry", slot.0);
                findings.add("F13", detail);
            }
            let record = self.objects.get(dir).map(|dir| &dir.record);
            // Nothing tells the next slot of a deleted directory.
            let is_missed = record.is_some_and(Record::has_slot_index);
            let is_possible = record.is_none_or(|record| record.next_slot >= SLOTS_WITHOUT_INDEX);
            let is_right = match self.slots.get(&(dir.clone(), slot)) {
                Some(found) if is_possible => {
                    left.remove(&(dir.clone(), slot));
                    *found == name
                }
                Some(_) => true,
                None => !is_missed,
            };
            if !is_right {
                findings.add("F13", format!("slot {} is not that of {path:?}", slot.0));
            }
            if slot.0 == SLOTS_WITHOUT_INDEX {
                let detail = format!("{path:?} has slot {}, that of the index", slot.0);
                findings.add("F13", detail);
            }
            let next = self.objects.get(dir).map(|dir| dir.record.next_slot);
            if next.is_some_and(|next| slot.0 >= next) {
                findings.add(
                    "F13",
                    format!("{path:?} has slot {}, not yet taken", slot.0),
                );
            }
        }
        for ((dir, slot), name) in left {
            let detail = format!("slot {} of {dir:?} names {name:?} in vain", slot.0);
            findings.add("F13", detail);
        }
    }

    /// The identities of all inodes that were shown, by path.
    pub(super) fn identities(&self) -> HashMap<&Bytes, Identity> {
        let mut identities = HashMap::new();
        // Paths are sorted: a directory comes before everything in it.
        for (path, object) in &self.objects {
            let found = match path.is_empty() {
                true => Some(Identity::root(object.record.birth)),
                false => {
                    let home = identities.get(&object.home).copied();
                    home.and_then(|home| self.tables.identity(home, &object.record))
                }
            };
            if let Some(found) = found {
                identities.insert(path, found);
            }
        }
        identities
    }

    /// F5, F14 and F15.
    pub(super) fn compare_numbers(&self, counters: Counters, findings: &mut Findings) {
        let identities = self.identities();
        let mut paths: HashMap<Ino, &Bytes> = HashMap::new();
        for (path, identity) in &identities {
            let ino = identity.ino;
            if let Some(other) = paths.insert(ino, path) {
                let detail = format!("{path:?} and {other:?} both have number {}", ino.0);
                findings.add("F5", detail);
            }
        }
        for (path, identity) in &identities {
            let mut before = self.tables.owners.range(..=identity.ino.0);
            let block = before.next_back();
            let is_inside = block.is_some_and(|(base, (_, run))| identity.ino.0 - base < run.len());
            if !is_inside && identity.ino != ROOT_INO {
                let detail = format!("number {} of {path:?} is in no block", identity.ino.0);
                findings.add("F14", detail);
            }
        }
        for (path, object) in &self.objects {
            if object.record.birth >= counters.generation {
                let birth = object.record.birth;
                findings.add("F9", format!("{path:?} was born with generation {birth}"));
            }
        }
        self.compare_link_numbers(&identities, findings);
        self.compare_blocks(&identities, counters, findings);
        self.compare_pins(&identities, findings);
    }

    /// F5 for link entries.
    fn compare_link_numbers(
        &self,
        identities: &HashMap<&Bytes, Identity>,
        findings: &mut Findings,
    ) {
        for (path, dir, entry) in &self.links {
            let Some(root) = self.root_of_link(dir, entry.link) else {
                continue;
            };
            let shared = keys::shared_inode(&root, entry.link);
            if !self.objects.contains_key(&shared) {
                continue;
            }
            let root = identities.get(&root).copied();
            let shown = root.and_then(|root| self.tables.link(root, entry.link, entry.pin));
            if shown != identities.get(&shared).map(|identity| identity.ino) {
                let detail = format!("link entry {path:?} shows another number than {shared:?}");
                findings.add("F5", detail);
            }
        }
    }

    /// F14, and F9 for blocks.
    fn compare_blocks(
        &self,
        identities: &HashMap<&Bytes, Identity>,
        counters: Counters,
        findings: &mut Findings,
    ) {
        let tables = &self.tables;
        let mut taken: BTreeMap<u64, u64> = BTreeMap::new();
        for (base, (_, run)) in &tables.owners {
            taken.insert(*base, run.len());
        }
        for (class, base) in &tables.free {
            let len = RUN_LENS.get(usize::from(*class)).copied().unwrap_or(0);
            if taken.insert(*base, len).is_some() {
                findings.add("F14", format!("free block {base} is taken"));
            }
        }
        let mut end = FIRST_NUMBER;
        for (base, len) in taken {
            if base < end || len == 0 || !base.is_multiple_of(len) {
                findings.add(
                    "F14",
                    format!("block {base} begins before {end}, or is not aligned"),
                );
            }
            end = end.max(base.saturating_add(len));
        }
        if end > counters.number {
            let last = counters.number;
            findings.add(
                "F14",
                format!("blocks end at {end}, above the counter {last}"),
            );
        }
        let there: BTreeSet<_> = identities.values().copied().collect();
        let waiting = tables.waiting();
        for (owner, block) in &tables.blocks {
            let (dir, run) = owner;
            if tables.owners.get(&block.base) != Some(owner) {
                let detail = format!(
                    "run {} of {dir:?} has block {} of another",
                    run.0, block.base
                );
                findings.add("F14", detail);
            }
            if !there.contains(dir) && !waiting.contains(dir) {
                findings.add("F14", format!("{dir:?} is gone and has run {}", run.0));
            }
            if block.generation >= counters.generation {
                findings.add(
                    "F9",
                    format!("block {} has generation {}", block.base, block.generation),
                );
            }
        }
        for (base, owner) in &tables.owners {
            let has_it = tables
                .blocks
                .get(owner)
                .is_some_and(|block| block.base == *base);
            let numbers = (Ino(*base), Ino(base + owner.1.len()));
            let is_held = tables.pinned.range(numbers.0..numbers.1).next().is_some()
                || tables.unpinned.range(numbers.0..numbers.1).next().is_some();
            if !has_it && !is_held {
                findings.add("F14", format!("block {base} is held by nothing"));
            }
        }
    }

    /// F15.
    fn compare_pins(&self, identities: &HashMap<&Bytes, Identity>, findings: &mut Findings) {
        let tables = &self.tables;
        let there: BTreeSet<_> = identities.values().copied().collect();
        let mut pins: BTreeMap<Ino, (Identity, Slot)> = BTreeMap::new();
        for (path, object) in &self.objects {
            let home = identities.get(&object.home).copied();
            let pin = object.record.pin.filter(|pin| Some(pin.home) == home);
            if let Some(pin) = pin
                && !path.is_empty()
            {
                pins.insert(pin.identity.ino, (pin.home, object.record.slot));
            }
        }
        for (ino, place) in &pins {
            if tables.pinned.get(ino) != Some(place) || !tables.pins_of.contains(&(place.0, *ino)) {
                findings.add(
                    "F15",
                    format!("number {} is pinned at {place:?} only there", ino.0),
                );
            }
        }
        for (ino, (home, slot)) in &tables.pinned {
            let is_lost = there.contains(home)
                && !tables.unpinned.contains(ino)
                && pins.get(ino) != Some(&(*home, *slot));
            // The pins of a directory that is gone are left until each number is unpinned.
            let leads_back = tables.pins_of.contains(&(*home, *ino));
            if is_lost || !leads_back && !tables.unpinned.contains(ino) {
                findings.add(
                    "F15",
                    format!("number {} is not at {home:?} {}", ino.0, slot.0),
                );
            }
        }
        for ino in tables.unpinned.iter().filter(|ino| pins.contains_key(ino)) {
            findings.add("F15", format!("number {} is pinned, and goes", ino.0));
        }
        for (home, ino) in &tables.pins_of {
            if tables.pinned.get(ino).is_none_or(|place| place.0 != *home) {
                findings.add("F15", format!("{home:?} does not have number {}", ino.0));
            }
        }
    }
}
