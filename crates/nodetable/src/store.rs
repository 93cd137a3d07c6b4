//! Where pages live: device, cache, allocator and the reference counts of shared pages.
//!
//! Reference counts follow Rodeh (section 5): a page's count is the number of pointers to it from
//! other pages and from tree roots. Only counts above one are kept, so a volume without snapshots
//! has none. Cloning a tree adds one to its root; shadowing a page with more than one reference
//! takes one away and adds one to each of its children; deleting a tree stops at such pages.
//!
//! Every allocation and freeing of a page is also noted in a log, from which `maps.rs` brings the
//! free-space map on disk up to date.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use quick_cache::sync::Cache;
use ramet_block::{Device, Extent, MetadataCopies, PageRef, checksum};

use crate::backing::BackedSpace;
use crate::error::{Error, Result};
use crate::page::{Body, Link, Page, Place, Shape, Structure};
use crate::space::Purpose;

/// Clean pages kept in memory, at least and at most: 1.5 and 100 MiB.
const CACHE_PAGES_MIN: u64 = 64;
const CACHE_PAGES: u64 = 4096;
/// Memory of a page of 8 KiB with its entries apart, about.
const PAGE_MEMORY_BYTES: u64 = 25 << 10;

/// So many bytes before and behind the newest root page are read with it: pages of the last
/// commits, of earlier ones, and the rest of the last one. On a disk they take 9 ms, as one jump
/// does.
const BEFORE_BYTES: u64 = 768 << 10;
const BEHIND_BYTES: u64 = 256 << 10;

/// Damaged pages that are noted until the next commit; more are found again by a later read.
const DAMAGED_MAX: usize = 1024;

/// Dirty pages are written in batches of about this many bytes.
const BATCH_BYTES: usize = 4 << 20;

/// Device, cache, allocator and counts, shared by the trees of one volume.
pub struct PageStore {
    device: Arc<dyn Device>,
    usable_addr: u64,
    /// Only grows.
    usable_end: AtomicU64,
    cache: Cache<PageRef, Arc<Page>>,
    pub(crate) space: BackedSpace,
    counts: Mutex<Counts>,
    log: Mutex<Vec<(Extent, i8)>>,
    copies: MetadataCopies,
    damaged: Mutex<Damaged>,
}

/// Pages of which one copy is bad and the other was read instead.
#[derive(Default)]
struct Damaged {
    pages: Vec<DamagedPage>,
    /// A page was noted since the pages were taken.
    has_news: bool,
    /// Pages that are damaged for certain.
    found: u64,
}

/// A page of which one copy is bad, and where a walk finds it.
#[derive(Debug, Clone)]
pub(crate) struct DamagedPage {
    pub structure: Structure,
    pub at: PageRef,
    pub height: u8,
    pub first_key: Box<[u8]>,
    /// Whether it is among the pages that were found. A walk that commits overtook may have met a page
    /// that was written over: such a page is not.
    pub is_counted: bool,
}

#[derive(Default)]
struct Counts {
    over_one: HashMap<u64, u64>,
    changed: BTreeSet<u64>,
}

impl PageStore {
    /// A store over `usable` in which nothing is free and no page is shared yet.
    pub(crate) fn new(device: Arc<dyn Device>, usable: Extent, copies: MetadataCopies) -> Self {
        Self {
            space: BackedSpace::new(device.clone(), usable),
            device,
            usable_addr: usable.addr,
            usable_end: AtomicU64::new(usable.end()),
            cache: Cache::new(usize::try_from(CACHE_PAGES).expect("some thousands")),
            counts: Mutex::default(),
            log: Mutex::default(),
            copies,
            damaged: Mutex::default(),
        }
    }

    /// How often a page is kept.
    pub(crate) fn copies(&self) -> MetadataCopies {
        self.copies
    }

    pub(crate) fn usable(&self) -> Extent {
        let end = self.usable_end.load(Ordering::Acquire);
        Extent::new(self.usable_addr, end - self.usable_addr)
    }

    /// Keeps clean pages of `bytes` in memory, about, within bounds.
    pub(crate) fn limit_cache(&self, bytes: u64) {
        let pages = (bytes / PAGE_MEMORY_BYTES).clamp(CACHE_PAGES_MIN, CACHE_PAGES);
        self.cache.set_capacity(pages);
    }

    /// Memory of the clean pages, about, in bytes.
    pub(crate) fn cached_bytes(&self) -> u64 {
        self.cache.len() as u64 * PAGE_MEMORY_BYTES
    }

    /// Makes the usable area end at `end`, behind where it ended.
    pub(crate) fn grow_to(&self, end: u64) {
        self.usable_end.store(end, Ordering::Release);
    }

    /// Discards `extents`, which nothing durable names. Best effort: a discard that fails leaves
    /// space allocated on the medium and changes nothing else.
    pub(crate) fn discard(&self, extents: &[Extent]) {
        for extent in extents {
            if self.device.discard(extent.addr, extent.len).is_err() {
                return;
            }
        }
    }

    /// The page that `link` points to, which must have `height` if that is known.
    pub(crate) fn resolve(
        &self,
        shape: &Shape,
        link: &Link,
        height: Option<u8>,
    ) -> Result<Arc<Page>> {
        let page = match link {
            Link::Dirty(page) => page.clone(),
            Link::Disk(at) => match self.cache.get(at) {
                Some(page) => page,
                None => self.read(shape, *at)?,
            },
        };
        match height {
            // Keeps walks finite: every step down a corrupt tree still falls by one.
            Some(height) if page.height != height => Err(Error::corrupt(
                shape.structure.name(),
                page.addr,
                format!("height {} where {height} belongs", page.height),
            )),
            _ => Ok(page),
        }
    }

    /// Has the device read the bytes around `addr` in one request: the pages of the newest commits,
    /// and the nodes that checkpoints wrote before them, are wanted next.
    pub(crate) fn expect_around(&self, addr: u64) {
        let usable = self.usable();
        // A small volume is no further across than that.
        let most = usable.len / 64;
        let start = addr.saturating_sub(BEFORE_BYTES.min(most));
        let end = addr.saturating_add(BEHIND_BYTES.min(most));
        let (start, end) = (start.max(usable.addr), end.min(usable.end()));
        if start < end {
            self.device.expect_read(start, end - start);
        }
    }

    fn read(&self, shape: &Shape, at: PageRef) -> Result<Arc<Page>> {
        let page = Arc::new(self.read_afresh(shape, at)?);
        // The checksum is part of the cache key, so a page left behind at a reused address is
        // never found again.
        self.cache.insert(at, page.clone());
        Ok(page)
    }

    /// The page at `at` as it lies on the device: the second copy where the first one is bad, which is
    /// noted for the next commit to mend.
    pub(crate) fn read_afresh(&self, shape: &Shape, at: PageRef) -> Result<Page> {
        let first = self.read_copy(shape, at, at.addr);
        if at.copy == 0 || first.is_ok() {
            return first;
        }
        // The error of the first copy tells more when both are bad.
        let Ok(page) = self.read_copy(shape, at, at.copy) else {
            return first;
        };
        self.note_damaged(shape, at, &page, false);
        Ok(page)
    }

    /// The page at `at` from its copy at `addr`.
    pub(crate) fn read_copy(&self, shape: &Shape, at: PageRef, addr: u64) -> Result<Page> {
        let name = shape.structure.name();
        let extent = Extent::new(addr, shape.page_bytes.into());
        extent
            .validate(self.usable())
            .map_err(Error::extent(name, addr))?;
        let mut bytes = vec![0; shape.page_bytes as usize];
        self.device.read_at(addr, &mut bytes)?;
        let found = checksum(&bytes);
        if found != at.checksum {
            let detail = format!("checksum {found:#018x}, expected {:#018x}", at.checksum);
            return Err(Error::corrupt(name, addr, detail));
        }
        Page::decode(shape, at.addr, &bytes)
    }

    /// Notes that a copy of `page`, which `at` points to, is bad: for certain, or as far as a walk can
    /// tell beside commits.
    pub(crate) fn note_damaged(&self, shape: &Shape, at: PageRef, page: &Page, is_certain: bool) {
        let mut damaged = self.damaged.lock();
        if let Some(known) = damaged.pages.iter_mut().find(|known| known.at == at) {
            let is_news = is_certain && !known.is_counted;
            known.is_counted |= is_certain;
            damaged.found += u64::from(is_news);
            return;
        }
        damaged.found += u64::from(is_certain);
        if damaged.pages.len() < DAMAGED_MAX {
            damaged.has_news = true;
            damaged.pages.push(DamagedPage {
                structure: shape.structure,
                at,
                height: page.height,
                first_key: page.first_key().into(),
                is_counted: is_certain,
            });
        }
    }

    /// Counts a damaged page that a commit renewed.
    pub(crate) fn count_damaged(&self) {
        self.damaged.lock().found += 1;
    }

    /// Keeps a damaged page for a later commit.
    pub(crate) fn keep_damaged(&self, page: DamagedPage) {
        self.damaged.lock().pages.push(page);
    }

    /// Whether a damaged page was noted since the last commit.
    pub(crate) fn has_damaged(&self) -> bool {
        self.damaged.lock().has_news
    }

    /// Hands over the pages that are noted as damaged.
    pub(crate) fn take_damaged(&self) -> Vec<DamagedPage> {
        let mut damaged = self.damaged.lock();
        damaged.has_news = false;
        std::mem::take(&mut damaged.pages)
    }

    /// Pages of which a read found one bad copy, since the store was opened.
    pub(crate) fn damaged_found(&self) -> u64 {
        self.damaged.lock().found
    }

    pub(crate) fn cache_page(&self, at: PageRef, page: Arc<Page>) {
        self.cache.insert(at, page);
    }

    pub(crate) fn alloc_page(&self, shape: &Shape) -> Result<Place> {
        let bytes = shape.page_bytes.into();
        let first = self.space.alloc(bytes, Purpose::Checkpoint)?;
        let second = match self.copies {
            MetadataCopies::One => None,
            MetadataCopies::Two => match self.space.alloc(bytes, Purpose::Copy) {
                Ok(second) => Some(second),
                Err(error) => {
                    self.space.lock().free_now(first);
                    return Err(error);
                }
            },
        };
        let mut log = self.log.lock();
        log.push((first, -1));
        log.extend(second.map(|second| (second, -1)));
        Ok(Place {
            addr: first.addr,
            copy: second.map_or(0, |second| second.addr),
        })
    }

    /// Frees a page that was never flushed.
    pub(crate) fn free_fresh(&self, shape: &Shape, place: Place) {
        for addr in place.copies() {
            let extent = Extent::new(addr, shape.page_bytes.into());
            self.log.lock().push((extent, 1));
            self.space.lock().free_now(extent);
        }
    }

    /// Frees a page that a durable checkpoint may name.
    pub(crate) fn free_flushed(&self, shape: &Shape, place: Place) {
        for addr in place.copies() {
            let extent = Extent::new(addr, shape.page_bytes.into());
            self.log.lock().push((extent, 1));
            self.space.lock().free_at_commit(extent);
        }
    }

    /// Allocations (-1) and freeings (+1) of pages since the last call.
    pub(crate) fn take_log(&self) -> Vec<(Extent, i8)> {
        std::mem::take(&mut *self.log.lock())
    }

    pub(crate) fn count(&self, addr: u64) -> u64 {
        self.counts.lock().over_one.get(&addr).copied().unwrap_or(1)
    }

    pub(crate) fn add_reference(&self, addr: u64) {
        let mut counts = self.counts.lock();
        *counts.over_one.entry(addr).or_insert(1) += 1;
        counts.changed.insert(addr);
    }

    /// Takes one reference away, unless it is the last. Says whether it did.
    pub(crate) fn drop_shared_reference(&self, addr: u64) -> bool {
        let mut counts = self.counts.lock();
        let Some(count) = counts.over_one.get_mut(&addr) else {
            return false;
        };
        *count -= 1;
        if *count == 1 {
            counts.over_one.remove(&addr);
        }
        counts.changed.insert(addr);
        true
    }

    /// Installs a count read from disk.
    pub(crate) fn load_count(&self, addr: u64, count: u64) {
        self.counts.lock().over_one.insert(addr, count);
    }

    /// Addresses whose count changed since the last call, with the count.
    pub(crate) fn take_changed_counts(&self) -> Vec<(u64, u64)> {
        let mut counts = self.counts.lock();
        let changed = std::mem::take(&mut counts.changed);
        let count = |addr: u64| counts.over_one.get(&addr).copied().unwrap_or(1);
        changed
            .into_iter()
            .map(|addr| (addr, count(addr)))
            .collect()
    }

    /// Every count above one.
    pub(crate) fn counts_over_one(&self) -> HashMap<u64, u64> {
        self.counts.lock().over_one.clone()
    }

    /// Lets go of `page`, which a writer replaces by a copy: a shared page loses one reference and
    /// its children, now named by the copy as well, gain one; an unshared page is freed.
    pub(crate) fn release_for_copy(&self, shape: &Shape, link: &Link, page: &Page) {
        if self.drop_shared_reference(page.addr) {
            if let Body::Index(entries) = &page.body {
                entries
                    .iter()
                    .for_each(|entry| self.add_reference(entry.link.addr()));
            }
        } else {
            self.free_page(shape, link);
        }
    }

    pub(crate) fn free_page(&self, shape: &Shape, link: &Link) {
        match link {
            Link::Dirty(page) if !page.is_written() => self.free_fresh(shape, page.place()),
            link => self.free_flushed(shape, link.place()),
        }
    }
}

/// Collects encoded pages and writes neighbours with one call.
pub(crate) struct Batch<'a> {
    store: &'a PageStore,
    pages: Vec<(u64, Vec<u8>)>,
    bytes: usize,
}

impl<'a> Batch<'a> {
    pub fn new(store: &'a PageStore) -> Self {
        Self {
            store,
            pages: Vec::new(),
            bytes: 0,
        }
    }

    /// Adds the bytes of the page at `at`, for each of its copies.
    pub fn push(&mut self, at: PageRef, bytes: Vec<u8>) -> Result<()> {
        if at.copy != 0 {
            self.bytes += bytes.len();
            self.pages.push((at.copy, bytes.clone()));
        }
        self.bytes += bytes.len();
        self.pages.push((at.addr, bytes));
        if self.bytes >= BATCH_BYTES {
            self.write()
        } else {
            Ok(())
        }
    }

    /// Writes the last batch. Not durable before the device is synced.
    pub fn write(&mut self) -> Result<()> {
        self.bytes = 0;
        let mut pages = std::mem::take(&mut self.pages);
        pages.sort_unstable_by_key(|page| page.0);
        let mut run: Option<(u64, Vec<u8>)> = None;
        for (addr, bytes) in pages {
            match &mut run {
                Some((start, run)) if *start + run.len() as u64 == addr => {
                    run.extend_from_slice(&bytes);
                }
                _ => {
                    if let Some((start, run)) = run.replace((addr, bytes)) {
                        self.store.device.write_at(start, &run)?;
                    }
                }
            }
        }
        match run {
            Some((start, run)) => Ok(self.store.device.write_at(start, &run)?),
            None => Ok(()),
        }
    }
}
