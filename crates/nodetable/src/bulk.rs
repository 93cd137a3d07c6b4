//! Reading many pages at once, as when a volume is opened.
//!
//! Pages that were written at different times lie in many places, and those of one time together.
//! So the pages are read in the order of their addresses: neighbours, with the bytes between them,
//! in one call, and the device is told of the next calls beforehand. A page of which the first
//! copy is bad is read alone, from its second copy.

use std::ops::Range;
use std::sync::Arc;

use ramet_block::PageRef;

use crate::error::{Error, Result};
use crate::page::{Body, LeafEntry, Link, Page, Shape};
use crate::store::PageStore;
use crate::tree::ShadowTree;

/// Bytes between two pages that are read along with them: a call of a fast device takes as long as
/// these bytes.
const GAP_BYTES: u64 = 64 << 10;
/// Most bytes of one call.
const RUN_BYTES: u64 = 1 << 20;
/// Calls that the device is told of beforehand.
const RUNS_AHEAD: usize = 16;

/// Pages that one call reads: a part of the sorted list, and the bytes from the first to the last.
struct Run {
    pages: Range<usize>,
    bytes: Range<u64>,
}

fn runs_of(sorted: &[(PageRef, usize)], page_bytes: u64) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (at, (page, _)) in sorted.iter().enumerate() {
        let end = page.addr.saturating_add(page_bytes);
        match runs.last_mut() {
            Some(run)
                if page.addr <= run.bytes.end.saturating_add(GAP_BYTES)
                    && end - run.bytes.start <= RUN_BYTES =>
            {
                run.pages.end = at + 1;
                run.bytes.end = run.bytes.end.max(end);
            }
            _ => runs.push(Run {
                pages: at..at + 1,
                bytes: page.addr..end,
            }),
        }
    }
    runs
}

impl<S> PageStore<S> {
    /// Reads the pages at `wanted` from the device, and hands over each with its position there, in
    /// the order of addresses.
    ///
    /// # Errors
    /// Those of a page of which no copy is good, and those of `visit`.
    pub(crate) fn read_many(
        &self,
        shape: &Shape,
        wanted: &[PageRef],
        visit: &mut dyn FnMut(usize, Page) -> Result<()>,
    ) -> Result<()> {
        let mut sorted: Vec<_> = wanted.iter().copied().zip(0..).collect();
        sorted.sort_unstable_by_key(|(page, _)| page.addr);
        // Keeps the walk short: a page has one parent.
        let twice = sorted
            .windows(2)
            .find(|pair| pair[0].0.addr == pair[1].0.addr);
        if let Some(pair) = twice {
            let detail = "S2: it has two parents";
            return Err(Error::corrupt(
                shape.structure.name(),
                pair[0].0.addr,
                detail,
            ));
        }
        let runs = runs_of(&sorted, shape.page_bytes.into());
        let expect = |run: &Run| self.expect(run.bytes.clone());
        runs.iter().take(RUNS_AHEAD).for_each(expect);
        for (at, run) in runs.iter().enumerate() {
            runs.get(at + RUNS_AHEAD).into_iter().for_each(expect);
            // A call that fails leaves each page to a call of its own.
            let bytes = self.read_run(run.bytes.clone());
            for (page, position) in &sorted[run.pages.clone()] {
                let read = bytes.as_ref().and_then(|bytes| {
                    let start = usize::try_from(page.addr - run.bytes.start).ok()?;
                    let bytes = bytes.get(start..)?.get(..shape.page_bytes as usize)?;
                    Self::decode_copy(shape, *page, page.addr, bytes).ok()
                });
                let read = match read {
                    Some(read) => read,
                    None => self.read_afresh(shape, *page)?,
                };
                visit(*position, read)?;
            }
        }
        Ok(())
    }
}

impl<S> ShadowTree<S> {
    /// The entries of all leaves, each turned into a value by `each`, in their order. The pages are
    /// read level by level.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Corrupt`], and those of `each`.
    pub(crate) fn read_all<T>(
        &self,
        each: &mut dyn FnMut(&LeafEntry) -> Result<T>,
    ) -> Result<Vec<T>> {
        let Some(root) = self.root.clone() else {
            return Ok(Vec::new());
        };
        let root = self.store.resolve(&self.shape, &root, None)?;
        let mut height = root.height;
        let mut level = vec![root];
        while height > 1 {
            height -= 1;
            level = self.level_below(&level, height)?;
        }
        if height == 0 {
            return level.iter().flat_map(|page| leaf(page)).map(each).collect();
        }
        let links = links_of(&level);
        let mut leaves: Vec<Vec<T>> = Vec::new();
        leaves.resize_with(links.len(), Vec::new);
        self.read_links(&links, 0, &mut |at, page| {
            leaves[at] = leaf(&page).iter().map(&mut *each).collect::<Result<_>>()?;
            Ok(())
        })?;
        Ok(leaves.into_iter().flatten().collect())
    }

    /// The children of `pages`, which are index pages, in their order.
    fn level_below(&self, pages: &[Arc<Page>], height: u8) -> Result<Vec<Arc<Page>>> {
        let links = links_of(pages);
        let mut below: Vec<Option<Arc<Page>>> = vec![None; links.len()];
        self.read_links(&links, height, &mut |at, page| {
            below[at] = Some(page);
            Ok(())
        })?;
        Ok(below.into_iter().flatten().collect())
    }

    /// Hands over the pages behind `links`, each with its position, in any order.
    fn read_links(
        &self,
        links: &[Link],
        height: u8,
        visit: &mut dyn FnMut(usize, Arc<Page>) -> Result<()>,
    ) -> Result<()> {
        let (mut wanted, mut positions) = (Vec::new(), Vec::new());
        for (at, link) in links.iter().enumerate() {
            match link {
                Link::Dirty(_) => visit(at, self.store.resolve(&self.shape, link, Some(height))?)?,
                Link::Disk(page) => {
                    wanted.push(*page);
                    positions.push(at);
                }
            }
        }
        self.store.read_many(&self.shape, &wanted, &mut |at, page| {
            if page.height != height {
                let detail = format!("height {} where {height} belongs", page.height);
                let name = self.shape.structure.name();
                return Err(Error::corrupt(name, page.addr, detail));
            }
            let page = Arc::new(page);
            if height > 0 {
                self.store.cache_page(wanted[at], Arc::clone(&page));
            }
            visit(positions[at], page)
        })
    }
}

fn links_of(pages: &[Arc<Page>]) -> Vec<Link> {
    let entries = pages.iter().flat_map(|page| match &page.body {
        Body::Index(entries) => &entries[..],
        Body::Leaf(_) => &[],
    });
    entries.map(|entry| entry.link.clone()).collect()
}

fn leaf(page: &Page) -> &[LeafEntry] {
    match &page.body {
        Body::Leaf(entries) => entries,
        Body::Index(_) => &[],
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, HashSet};
    use std::io;
    use std::sync::atomic::{AtomicU64, Ordering};

    use parking_lot::Mutex;
    use ramet_block::{BLOCK_BYTES, Device, Extent, MetadataCopies};
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;
    use crate::free_map::FreeMap;
    use crate::sharing::Unshared;

    /// A large device of which few blocks are written. It counts its reads.
    #[derive(Default)]
    struct Counting {
        blocks: Mutex<HashMap<u64, Vec<u8>>>,
        reads: AtomicU64,
    }

    const DEVICE_BYTES: u64 = 64 << 30;

    impl Device for Counting {
        fn len_bytes(&self) -> u64 {
            DEVICE_BYTES
        }

        fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
            self.reads.fetch_add(1, Ordering::Relaxed);
            let blocks = self.blocks.lock();
            for (at, part) in (addr..).step_by(4096).zip(buf.chunks_mut(4096)) {
                match blocks.get(&at) {
                    Some(block) => part.copy_from_slice(&block[..part.len()]),
                    None => part.fill(0),
                }
            }
            Ok(())
        }

        fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
            let mut blocks = self.blocks.lock();
            for (at, part) in (addr..).step_by(4096).zip(buf.chunks(4096)) {
                blocks.insert(at, part.to_vec());
            }
            Ok(())
        }

        fn sync(&self) -> io::Result<()> {
            Ok(())
        }

        fn discard(&self, _: u64, _: u64) -> io::Result<()> {
            Ok(())
        }
    }

    /// `RAMET_HOLES` chooses how many holes there are, about.
    #[test]
    fn map_of_an_aged_volume_is_read_in_few_calls() {
        let holes = std::env::var("RAMET_HOLES").map_or(30_000, |text| text.parse().unwrap());
        const ROUNDS: u64 = 50;
        let counting = Arc::new(Counting::default());
        let device: Arc<dyn Device> = counting.clone();
        let usable = Extent::new(1 << 20, DEVICE_BYTES - (1 << 20));
        let open = || PageStore::open(&device, usable, MetadataCopies::Two, Unshared).unwrap();
        let store = open();
        store.space.lock().free_bare(usable);
        let mut map = FreeMap::new(&store);
        map.settle(vec![(usable, 1)]).unwrap();
        let mut root = map.flush().unwrap();
        let mut rng = StdRng::seed_from_u64(7);
        let mut taken = HashSet::new();
        // Blocks come and go in random places, in many commits, as on a volume that is old.
        for _ in 0..ROUNDS {
            let (mut events, mut changed) = (Vec::new(), HashSet::new());
            for _ in 0..holes * 3 / 2 / ROUNDS {
                let number = rng.random_range(0..DEVICE_BYTES / BLOCK_BYTES / 4 - 1);
                let extent = Extent::new(DEVICE_BYTES / 2 + 2 * number * BLOCK_BYTES, BLOCK_BYTES);
                if !changed.insert(extent) {
                    continue;
                }
                let mut space = store.space.lock();
                if taken.remove(&extent) {
                    space.free_now(extent);
                    events.push((extent, 1));
                } else if space.take(extent) {
                    taken.insert(extent);
                    events.push((extent, -1));
                }
            }
            map.settle(events).unwrap();
            root = map.flush().unwrap();
            let mut space = store.space.lock();
            let freed = space.take_freed();
            space.release(&freed);
        }
        let expected = map.holes().unwrap();
        let before = counting.reads.load(Ordering::Relaxed);
        let tree = FreeMap::load(&open(), root).unwrap().tree;
        let reads = counting.reads.load(Ordering::Relaxed) - before;
        assert!(tree.root.is_some());
        let before = counting.reads.load(Ordering::Relaxed);
        let one_by_one = ShadowTree::open(open(), tree.shape, root);
        let entries = one_by_one.range(&[]).collect::<Result<Vec<_>>>().unwrap();
        let entries = entries.len();
        let singly = counting.reads.load(Ordering::Relaxed) - before;
        println!("{entries} holes: {reads} reads, page by page {singly}");
        assert_eq!(entries, expected.len());
        assert_eq!(
            FreeMap::load(&open(), root).unwrap().holes().unwrap(),
            expected
        );
        assert!(reads * 8 < singly, "{reads} reads of {singly} pages");
    }

    #[test]
    fn neighbours_are_read_together_and_far_ones_alone() {
        let page = |addr| PageRef {
            addr,
            copy: 0,
            checksum: 0,
        };
        let addrs = [0, 4096, 60 << 10, 200 << 10, 264 << 10, 10 << 20];
        let sorted: Vec<_> = addrs.map(page).into_iter().zip(0..).collect();
        let runs = runs_of(&sorted, 4096);
        let told: Vec<_> = runs.into_iter().map(|run| (run.pages, run.bytes)).collect();
        let kib = |start: u64, end: u64| start << 10..end << 10;
        assert_eq!(
            told,
            [
                (0..3, kib(0, 64)),
                (3..5, kib(200, 268)),
                (5..6, kib(10 << 10, (10 << 10) + 4))
            ]
        );
    }
}
