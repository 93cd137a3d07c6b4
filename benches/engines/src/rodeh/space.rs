//! The free space of a forest in memory: pages are handed out by next fit, so those of one commit
//! lie next to each other.

use std::collections::BTreeMap;

use ramet_block::Extent;

use super::error::{Error, Result};

/// Disjoint holes that do not touch, and the extents that wait for a commit.
#[derive(Default)]
pub struct Space {
    holes: BTreeMap<u64, u64>,
    /// Where the last extent ended.
    next: u64,
    freed: Vec<Extent>,
}

impl Space {
    /// An extent of `len` bytes.
    pub fn alloc(&mut self, len: u64) -> Result<Extent> {
        let behind = self.holes.range(self.next..).chain(&self.holes);
        let found = behind.map(|(&addr, &hole)| Extent::new(addr, hole));
        let Some(hole) = found.into_iter().find(|hole| hole.len >= len) else {
            return Err(Error::NoSpace { wanted_bytes: len });
        };
        self.holes.remove(&hole.addr);
        if hole.len > len {
            self.holes.insert(hole.addr + len, hole.len - len);
        }
        self.next = hole.addr + len;
        Ok(Extent::new(hole.addr, len))
    }

    /// Makes `extent` allocatable at once.
    pub fn free_now(&mut self, extent: Extent) {
        let (mut start, mut end) = (extent.addr, extent.end());
        if let Some((&addr, &len)) = self.holes.range(..start).next_back()
            && addr + len == start
        {
            self.holes.remove(&addr);
            start = addr;
        }
        if let Some(len) = self.holes.remove(&end) {
            end += len;
        }
        self.holes.insert(start, end - start);
    }

    /// Takes note of an extent that the running commit frees.
    pub fn free_at_commit(&mut self, extent: Extent) {
        self.freed.push(extent);
    }

    /// Hands over the extents freed since the last call.
    pub fn take_freed(&mut self) -> Vec<Extent> {
        std::mem::take(&mut self.freed)
    }

    #[cfg(test)]
    pub fn free_bytes(&self) -> u64 {
        self.holes.values().sum()
    }
}
