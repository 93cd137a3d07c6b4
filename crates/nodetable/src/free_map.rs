//! The free-space map on disk, as a small tree of its own.
//!
//! ```text
//! key = address, u64 big-endian   value = length of the hole, u64
//! ```
//!
//! The map on disk of a checkpoint G is the exact complement of the extents of nodes, and of the
//! pages of both trees, that G names. Space that G freed is free in it, since the map is read
//! only when G is durable. Space that was allocated, and that G does not name, is free in it as
//! well, so a crash leaks nothing.
//!
//! Each commit brings the map up to date by the changes since the last one only. These change pages
//! of the map, whose shadows are allocations and freeings again, so [`FreeMap::settle`] goes on
//! until a round changes nothing. The rounds end: a page is shadowed once per commit, and further
//! changes to it are in place.
//!
//! Keeps: M1, holes are sorted, disjoint, and do not touch. M2, holes = usable area less everything
//! that the checkpoint names.

use std::collections::BTreeMap;
use std::sync::Arc;

use ramet_block::{Extent, PageRef, Reader};

use crate::error::{Error, Result};
use crate::page::{Shape, Structure};
use crate::sharing::{Sharing, Unshared};
use crate::store::PageStore;
use crate::tree::ShadowTree;

pub(crate) const FREE_MAP_SHAPE: Shape = Shape::new(Structure::SpaceMap, 4096);

/// More rounds than this mean that the map is at odds with itself: each round but the last shadows
/// a page of the map, and pages shadowed in one round lie in few places.
const ROUNDS_MAX: u32 = 10_000;

const SPACE_MAP: &str = "space map";

/// The free-space map of the last commit, and the changes to it that the next one writes.
pub struct FreeMap<S = Unshared> {
    pub(crate) tree: ShadowTree<S>,
}

fn value_of(bytes: &[u8], structure: &'static str, addr: u64) -> Result<u64> {
    let mut r = Reader::new(bytes);
    let value = r.u64().and_then(|value| r.finish().map(|()| value));
    value.map_err(Error::malformed(structure, addr))
}

fn key_of(bytes: &[u8], structure: &'static str) -> Result<u64> {
    let key = <[u8; 8]>::try_from(bytes);
    key.map(u64::from_be_bytes)
        .map_err(|_| Error::corrupt(structure, 0, "a key is not 8 bytes"))
}

impl<S: Sharing> FreeMap<S> {
    /// A map over the usable area of `store`, all of which is free from now on.
    ///
    /// # Errors
    /// [`Error::NoSpace`] when the area cannot hold the map.
    pub fn format(store: &Arc<PageStore<S>>) -> Result<Self> {
        let usable = store.usable();
        store.space.lock().free_bare(usable);
        let mut map = Self::new(store);
        map.settle(vec![(usable, 1)])?;
        Ok(map)
    }

    /// An empty map: nothing is free.
    pub(crate) fn new(store: &Arc<PageStore<S>>) -> Self {
        Self::open(store, PageRef::NONE)
    }

    fn open(store: &Arc<PageStore<S>>, root: PageRef) -> Self {
        let tree = ShadowTree::open(store.clone(), FREE_MAP_SHAPE, root);
        Self { tree }
    }

    /// Opens the map and fills the allocator of `store` from it, with reads of many pages each.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Corrupt`].
    pub fn load(store: &Arc<PageStore<S>>, root: PageRef) -> Result<Self> {
        let map = Self::open(store, root);
        let holes = map.holes()?;
        let mut allocator = store.space.lock();
        holes.into_iter().for_each(|hole| allocator.free_bare(hole));
        drop(allocator);
        Ok(map)
    }

    /// The holes on disk, validated. Checks M1.
    pub(crate) fn holes(&self) -> Result<Vec<Extent>> {
        let usable = self.tree.store.usable();
        let holes = self.tree.read_all(&mut |entry| {
            let addr = key_of(&entry.key, SPACE_MAP)?;
            let hole = Extent::new(addr, value_of(&entry.value, SPACE_MAP, addr)?);
            hole.validate(usable)
                .map_err(Error::extent(SPACE_MAP, addr))?;
            Ok(hole)
        })?;
        let touching = holes.windows(2).find(|pair| pair[0].end() >= pair[1].addr);
        match touching {
            None => Ok(holes),
            Some(pair) => Err(Error::corrupt(
                SPACE_MAP,
                pair[1].addr,
                "M1: a hole touches its predecessor",
            )),
        }
    }

    /// Brings the map up to date with `nodes` (extents that this commit begins, -1, and ceases,
    /// +1, to name), with the pages that changed, and with itself.
    ///
    /// # Errors
    /// [`Error::NoSpace`], [`Error::Io`], or [`Error::Corrupt`] when M2 does not hold.
    pub fn settle(&mut self, nodes: Vec<(Extent, i8)>) -> Result<()> {
        let store = self.tree.store.clone();
        let mut events = nodes;
        for _ in 0..ROUNDS_MAX {
            events.extend(store.take_log());
            if events.is_empty() {
                return Ok(());
            }
            for (extent, change) in net(&events) {
                if change < 0 {
                    self.take(extent)?
                } else {
                    self.give(extent)?
                }
            }
            events.clear();
        }
        Err(Error::corrupt(SPACE_MAP, 0, "it does not settle"))
    }

    /// Writes the dirty pages; returns the root. All other trees of the store are flushed before.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn flush(&mut self) -> Result<PageRef> {
        let root = self.tree.flush()?;
        self.tree.store.end_log();
        Ok(root)
    }

    /// The last hole that begins at or before `addr`.
    fn hole_before(&self, addr: u64) -> Result<Option<Extent>> {
        let Some((key, value)) = self.tree.floor(&addr.to_be_bytes())? else {
            return Ok(None);
        };
        let addr = key_of(&key, SPACE_MAP)?;
        Ok(Some(Extent::new(addr, value_of(&value, SPACE_MAP, addr)?)))
    }

    fn set(&mut self, addr: u64, len: u64) -> Result<()> {
        self.tree
            .insert(&addr.to_be_bytes(), &len.to_le_bytes())
            .map(drop)
    }

    fn take(&mut self, extent: Extent) -> Result<()> {
        let hole = self
            .hole_before(extent.addr)?
            .filter(|hole| hole.contains(&extent));
        let Some(hole) = hole else {
            let detail = format!("M2: {extent} is taken but was not free");
            return Err(Error::corrupt(SPACE_MAP, extent.addr, detail));
        };
        if hole.addr < extent.addr {
            self.set(hole.addr, extent.addr - hole.addr)?;
        } else {
            self.tree.remove(&hole.addr.to_be_bytes())?;
        }
        if extent.end() < hole.end() {
            self.set(extent.end(), hole.end() - extent.end())?;
        }
        Ok(())
    }

    fn give(&mut self, extent: Extent) -> Result<()> {
        let (mut start, mut end) = (extent.addr, extent.end());
        // The last hole that begins before the end is the only one that can overlap or precede.
        if let Some(hole) = self.hole_before(end - 1)? {
            if hole.end() > start {
                let detail = format!("M2: {extent} is freed but {hole} was free");
                return Err(Error::corrupt(SPACE_MAP, extent.addr, detail));
            }
            if hole.end() == start {
                start = hole.addr;
            }
        }
        if let Some(value) = self.tree.lookup(&end.to_be_bytes())? {
            self.tree.remove(&end.to_be_bytes())?;
            end += value_of(&value, SPACE_MAP, end)?;
        }
        self.set(start, end - start)
    }
}

/// The rest of `events` when opposites cancel, neighbours of one kind joined, by address.
/// Events need not be of equal extents: a place may be freed in pages and taken as one.
fn net(events: &[(Extent, i8)]) -> Vec<(Extent, i8)> {
    let mut edges: BTreeMap<u64, i64> = BTreeMap::new();
    for (extent, change) in events {
        *edges.entry(extent.addr).or_default() += i64::from(*change);
        *edges.entry(extent.end()).or_default() -= i64::from(*change);
    }
    let mut ranges = Vec::new();
    let (mut from, mut level) = (0, 0i64);
    for (addr, step) in edges {
        if step == 0 {
            continue;
        }
        if level != 0 {
            ranges.push((Extent::new(from, addr - from), level.signum() as i8));
        }
        from = addr;
        level += step;
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(n: u64, pages: u64) -> Extent {
        Extent::new(n * 4096, pages * 4096)
    }

    #[test]
    fn net_cancels_opposites_and_joins_neighbours() {
        assert_eq!(net(&[(page(1, 1), -1), (page(1, 1), 1)]), []);
        assert_eq!(
            net(&[(page(1, 1), -1), (page(2, 2), -1)]),
            [(page(1, 3), -1)]
        );
        assert_eq!(
            net(&[
                (page(1, 1), -1),
                (page(1, 1), 1),
                (page(1, 2), -1),
                (page(5, 1), 1)
            ]),
            [(page(1, 2), -1), (page(5, 1), 1)]
        );
        assert_eq!(
            net(&[(page(1, 1), -1), (page(2, 1), 1)]),
            [(page(1, 1), -1), (page(2, 1), 1)]
        );
    }
}
