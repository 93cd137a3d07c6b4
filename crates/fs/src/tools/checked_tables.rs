//! The tables of inode numbers, as the check reads them.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::Result;
use crate::format::ino::{Identity, Ino};
use crate::format::keys::NumberKey;
use crate::format::record::{Pin, Record};
use crate::format::slots::{Block, Run, Slot};
use crate::namespace::number_tables::{read_block, read_owner, read_place};

/// The tables of numbers.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) blocks: BTreeMap<(Identity, Run), Block>,
    pub(super) owners: BTreeMap<u64, (Identity, Run)>,
    pub(super) free: BTreeSet<(u8, u64)>,
    pub(super) pinned: BTreeMap<Ino, (Identity, Slot)>,
    pub(super) pins_of: BTreeSet<(Identity, Ino)>,
    pub(super) dead: BTreeSet<Identity>,
    pub(super) unpinned: BTreeSet<Ino>,
}

impl Tables {
    /// Adds a key of the tables.
    ///
    /// # Errors
    /// `Corrupt` for a value that its key cannot have.
    pub(super) fn add(&mut self, key: NumberKey, value: &[u8]) -> Result<()> {
        match key {
            NumberKey::Block(dir, run) => {
                self.blocks.insert((dir, run), read_block(run, value)?.0);
            }
            NumberKey::Owner(base) => {
                self.owners.insert(base, read_owner(value)?);
            }
            NumberKey::Free(class, base) => {
                self.free.insert((class, base));
            }
            NumberKey::Pinned(ino) => {
                self.pinned.insert(ino, read_place(value)?);
            }
            NumberKey::PinOf(dir, ino) => {
                self.pins_of.insert((dir, ino));
            }
            NumberKey::Dead(dir) => {
                self.dead.insert(dir);
            }
            NumberKey::Unpinned(ino) => {
                self.unpinned.insert(ino);
            }
        }
        Ok(())
    }

    /// The identity of the inode with this record in a directory, if it was shown.
    pub(super) fn identity(&self, dir: Identity, record: &Record) -> Option<Identity> {
        if let Some(pin) = record.pin.filter(|pin| pin.home == dir) {
            return Some(pin.identity);
        }
        let block = self.blocks.get(&(dir, record.slot.run()))?;
        Some(block.identity(record.slot, record.birth))
    }

    /// The number of shared inode `link` of a clone root, as a link entry with this pin shows it.
    pub(super) fn link(&self, root: Identity, link: u64, pin: Option<Pin>) -> Option<Ino> {
        if let Some(pin) = pin.filter(|pin| pin.home == root) {
            return Some(pin.identity.ino);
        }
        let slot = Slot::shared(link);
        let block = self.blocks.get(&(root, slot.run()))?;
        Some(block.identity(slot, 0).ino)
    }

    /// The directories that wait for their reclaim, and those below them.
    pub(super) fn waiting(&self) -> BTreeSet<Identity> {
        let mut waiting = BTreeSet::new();
        let mut next: Vec<_> = self.dead.iter().copied().collect();
        while let Some(dir) = next.pop() {
            if !waiting.insert(dir) {
                continue;
            }
            let its_blocks = self.blocks.range((dir, Run(0))..=(dir, Run(u64::MAX)));
            for ((_, run), block) in its_blocks {
                for ino in (block.base..block.base + run.len()).map(Ino) {
                    if !self.pinned.contains_key(&ino) {
                        next.extend(self.directories(ino));
                    }
                }
            }
            let its_pins = self.pins_of.range((dir, Ino(0))..=(dir, Ino(u64::MAX)));
            next.extend(its_pins.flat_map(|(_, ino)| self.directories(*ino)));
        }
        waiting
    }

    /// The directories of a number that have blocks or pins.
    fn directories(&self, ino: Ino) -> Vec<Identity> {
        let [first, last] = [0, u64::MAX].map(|generation| Identity { ino, generation });
        let blocks = self.blocks.range((first, Run(0))..=(last, Run(u64::MAX)));
        let pins = self.pins_of.range((first, Ino(0))..=(last, Ino(u64::MAX)));
        let with_blocks = blocks.map(|((dir, _), _)| *dir);
        with_blocks.chain(pins.map(|(dir, _)| *dir)).collect()
    }
}
