//! The numbers of pointers to pages that have several, in memory and on disk.
//!
//! Counts are lazy (Rodeh, section 5): a page whose count is above one keeps the pages below it
//! alive. They have more pointers only when that page is copied.
//!
//! ```text
//! tree of counts:  key = page address, u64 big-endian   value = count, u64, 2 or more
//! ```

use std::collections::{BTreeSet, HashMap};

use parking_lot::Mutex;
use ramet_nodetable::pages::{Page, Sharing};
use ramet_nodetable::{Error, Result};

use super::forest::Tree;

/// Counts of all pages of a forest. A page that is not written has one pointer.
#[derive(Default)]
pub struct Counts(Mutex<State>);

#[derive(Default)]
struct State {
    over_one: HashMap<u64, u64>,
    /// Pages whose count on disk is another one.
    changed: BTreeSet<u64>,
}

impl Counts {
    /// Counts one more pointer to the page at `addr`.
    pub fn add(&self, addr: u64) {
        let mut state = self.0.lock();
        *state.over_one.entry(addr).or_insert(1) += 1;
        state.changed.insert(addr);
    }

    /// Counts one pointer less, unless it is the last. Says whether others are left.
    pub fn drop_one(&self, addr: u64) -> bool {
        let mut state = self.0.lock();
        let Some(count) = state.over_one.get_mut(&addr) else {
            return false;
        };
        *count -= 1;
        if *count == 1 {
            state.over_one.remove(&addr);
        }
        state.changed.insert(addr);
        true
    }

    /// Takes over the counts of a commit.
    pub fn load(&self, tree: &Tree) -> Result<()> {
        let mut state = self.0.lock();
        for entry in tree.range(&[]) {
            let (key, value) = entry?;
            let addr = (*key).try_into().map(u64::from_be_bytes);
            let count = (*value).try_into().map(u64::from_le_bytes);
            let (Ok(addr), Ok(count @ 2..)) = (addr, count) else {
                return Err(Error::Corrupt {
                    structure: "page count",
                    addr: 0,
                    detail: format!("a count of {value:?} for the page {key:?}"),
                });
            };
            state.over_one.insert(addr, count);
        }
        Ok(())
    }

    /// Brings `tree` up to date.
    pub fn write(&self, tree: &mut Tree) -> Result<()> {
        let changed = std::mem::take(&mut self.0.lock().changed);
        for addr in changed {
            let count = self.0.lock().over_one.get(&addr).copied();
            match count {
                Some(count) => tree.insert(&addr.to_be_bytes(), &count.to_le_bytes())?,
                None => tree.remove(&addr.to_be_bytes())?,
            };
        }
        Ok(())
    }
}

impl Sharing for Counts {
    /// The children of a shared page have one pointer more: from the copy.
    fn unshare(&self, page: &Page) -> bool {
        let is_shared = self.drop_one(page.addr);
        if is_shared {
            page.children().for_each(|child| self.add(child.addr()));
        }
        is_shared
    }
}
