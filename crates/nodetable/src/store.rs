//! Where pages live: device, cache and allocator.
//!
//! Every allocation and freeing of a page is also noted in a log, from which `free_map.rs` brings the
//! free-space map on disk up to date.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use quick_cache::sync::Cache;
use ramet_block::{Call, Device, DeviceError, Extent, MetadataCopies, PageRef, checksum};

use crate::damaged::DamagedPages;
use crate::error::{Error, Result};
use crate::held_pages::Pins;
use crate::page::{Link, Page, Place, Shape};
use crate::sharing::Unshared;
use crate::space::{BackedSpace, Purpose};

/// Clean pages kept in memory when no limit is set.
pub(crate) const CACHE_PAGES: u64 = 4096;
/// Memory of a page of 8 KiB with its entries apart, about.
pub(crate) const PAGE_MEMORY_BYTES: u64 = 25 << 10;

/// So many bytes before and behind the newest root page are read with it: pages of the last
/// commits, of earlier ones, and the rest of the last one. On a disk they take 9 ms, as one jump
/// does.
const BEFORE_BYTES: u64 = 768 << 10;
const BEHIND_BYTES: u64 = 256 << 10;

/// Dirty pages are written in batches of about this many bytes.
const BATCH_BYTES: usize = 4 << 20;

/// Device, cache and allocator, shared by the trees of one volume.
pub struct PageStore<S = Unshared> {
    device: Arc<dyn Device>,
    usable_addr: u64,
    /// Only grows.
    usable_end: AtomicU64,
    cache: Cache<PageRef, Arc<Page>>,
    pub(crate) space: BackedSpace,
    log: Mutex<PageLog>,
    copies: MetadataCopies,
    pub(crate) damaged: DamagedPages,
    /// Knows which pages are shared.
    pub sharing: S,
    pub(crate) pins: Pins,
}

/// Allocations (-1) and freeings (+1) of pages since the last flush.
#[derive(Default)]
struct PageLog {
    events: Vec<(Extent, i8)>,
    /// Events that the map knows.
    taken: usize,
}

impl<S> PageStore<S> {
    /// A store over `usable` in which nothing is free yet.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when `usable` is unaligned or outside of the device.
    pub fn open(
        device: &Arc<dyn Device>,
        usable: Extent,
        copies: MetadataCopies,
        sharing: S,
    ) -> Result<Arc<Self>> {
        let whole = Extent::new(0, device.len_bytes());
        usable
            .validate(whole)
            .map_err(Error::extent("usable area", usable.addr))?;
        Ok(Arc::new(Self {
            space: BackedSpace::new(device.clone(), usable),
            device: device.clone(),
            usable_addr: usable.addr,
            usable_end: AtomicU64::new(usable.end()),
            cache: Cache::new(usize::try_from(CACHE_PAGES).expect("some thousands")),
            log: Mutex::default(),
            copies,
            damaged: DamagedPages::default(),
            sharing,
            pins: Pins::default(),
        }))
    }

    /// How often a page is kept.
    pub(crate) fn copies(&self) -> MetadataCopies {
        self.copies
    }

    pub(crate) fn usable(&self) -> Extent {
        let end = self.usable_end.load(Ordering::Acquire);
        Extent::new(self.usable_addr, end - self.usable_addr)
    }

    /// Keeps clean pages of `bytes` in memory, about.
    pub fn limit_cache(&self, bytes: u64) {
        self.cache.set_capacity(bytes / PAGE_MEMORY_BYTES);
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

    /// Discards extents that a durable commit freed, and makes them allocatable. On a sparse device
    /// they stay backed.
    pub(crate) fn give_back(&self, freed: Vec<Extent>) {
        let freed = if self.space.is_sparse() {
            freed
        } else {
            self.discard_runs(freed)
        };
        self.release(&freed);
    }

    /// Discards extents that no node needs any more, before they may have a new owner; returns them
    /// as runs.
    pub(crate) fn discard_runs(&self, mut freed: Vec<Extent>) -> Vec<Extent> {
        freed.sort_unstable();
        let mut runs: Vec<Extent> = Vec::new();
        for extent in &freed {
            match runs.last_mut() {
                Some(run) if run.end() == extent.addr => run.len += extent.len,
                _ => runs.push(*extent),
            }
        }
        self.discard(&runs);
        runs
    }

    /// Drops all clean pages.
    #[cfg(test)]
    pub(crate) fn forget_cached(&self) {
        self.cache.clear();
    }

    /// The page that `link` points to, which must have `height` if that is known.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Corrupt`].
    pub fn resolve(&self, shape: &Shape, link: &Link, height: Option<u8>) -> Result<Arc<Page>> {
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

    /// Tells the device that these bytes are read in a moment.
    pub(crate) fn expect(&self, bytes: Range<u64>) {
        self.device
            .expect_read(bytes.start, bytes.end - bytes.start);
    }

    /// The bytes of a range of the usable area; `None` if they cannot be read in one call.
    pub(crate) fn read_run(&self, range: Range<u64>) -> Option<Vec<u8>> {
        let len = range.end.checked_sub(range.start)?;
        let extent = Extent::new(range.start, len);
        if !self.usable().contains(&extent) {
            return None;
        }
        let mut bytes = vec![0; usize::try_from(len).ok()?];
        let read = self.device.read_alone_at(range.start, &mut bytes);
        read.ok().map(|()| bytes)
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
        self.damaged.note(shape, at, &page, false);
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
        self.device
            .read_at(addr, &mut bytes)
            .map_err(DeviceError::at(Call::Read, name, addr))?;
        Self::decode_copy(shape, at, addr, &bytes)
    }

    /// The page at `at` out of the bytes of its copy at `addr`.
    pub(crate) fn decode_copy(shape: &Shape, at: PageRef, addr: u64, bytes: &[u8]) -> Result<Page> {
        let name = shape.structure.name();
        let found = checksum(bytes);
        if found != at.checksum {
            let detail = format!("checksum {found:#018x}, expected {:#018x}", at.checksum);
            return Err(Error::corrupt(name, addr, detail));
        }
        Page::decode(shape, at.addr, bytes)
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
        log.events.push((first, -1));
        log.events.extend(second.map(|second| (second, -1)));
        Ok(Place {
            addr: first.addr,
            copy: second.map_or(0, |second| second.addr),
        })
    }

    /// Frees a page that was never flushed.
    pub(crate) fn free_fresh(&self, shape: &Shape, place: Place) {
        for addr in place.copies() {
            let extent = Extent::new(addr, shape.page_bytes.into());
            self.log.lock().events.push((extent, 1));
            self.space.lock().free_now(extent);
        }
    }

    /// Frees a page that a durable checkpoint may name.
    pub(crate) fn free_flushed(&self, shape: &Shape, place: Place) {
        for addr in place.copies() {
            let extent = Extent::new(addr, shape.page_bytes.into());
            self.log.lock().events.push((extent, 1));
            self.space.lock().free_at_commit(extent);
        }
    }

    /// Hands over the extents that were freed since the last call: the running commit frees them.
    /// They are usable after [`PageStore::release`].
    #[must_use]
    pub fn take_freed(&self) -> Vec<Extent> {
        self.space.lock().take_freed()
    }

    /// Makes extents that a commit freed usable, when that commit is durable.
    pub fn release(&self, freed: &[Extent]) {
        self.space.lock().release(freed);
    }

    /// Bytes that can be allocated now.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.space.lock().free_bytes()
    }

    /// Allocations (-1) and freeings (+1) of pages since the last call.
    pub(crate) fn take_log(&self) -> Vec<(Extent, i8)> {
        let mut log = self.log.lock();
        let news = log.events[log.taken..].to_vec();
        log.taken = log.events.len();
        news
    }

    /// Pages that were freed since the last flush, and pages that were never flushed among them.
    pub(crate) fn freed_pages(&self) -> BTreeSet<Extent> {
        let log = self.log.lock();
        let freed = log.events.iter().filter(|(_, change)| *change > 0);
        freed.map(|(extent, _)| *extent).collect()
    }

    /// Forgets the allocations and freeings: their pages are written.
    pub(crate) fn end_log(&self) {
        *self.log.lock() = PageLog::default();
    }

    /// Takes back the allocations and freeings since the last flush, of which no page is written.
    /// Those pages that are freed at the commit are up to the allocator.
    pub(crate) fn undo_log(&self) {
        let events = std::mem::take(&mut *self.log.lock()).events;
        let mut fresh = BTreeSet::new();
        for (extent, change) in events {
            if change < 0 {
                fresh.insert(extent);
            } else {
                fresh.remove(&extent);
            }
        }
        let mut space = self.space.lock();
        fresh.into_iter().for_each(|extent| space.free_now(extent));
    }

    /// Frees the page behind `link`, which a writer gives up or replaces by a copy.
    pub fn free_page(&self, shape: &Shape, link: &Link) {
        match link {
            Link::Dirty(page) => self.free_fresh(shape, page.place()),
            Link::Disk(_) => self.free_flushed(shape, link.place()),
        }
    }
}

/// Collects encoded pages and writes neighbours with one call.
pub(crate) struct Batch<'a, S> {
    store: &'a PageStore<S>,
    pages: Vec<(u64, Vec<u8>)>,
    bytes: usize,
}

impl<'a, S> Batch<'a, S> {
    pub fn new(store: &'a PageStore<S>) -> Self {
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
                        self.write_run(start, &run)?;
                    }
                }
            }
        }
        match run {
            Some((start, run)) => self.write_run(start, &run),
            None => Ok(()),
        }
    }

    fn write_run(&self, start: u64, run: &[u8]) -> Result<()> {
        let written = self.store.device.write_at(start, run);
        Ok(written.map_err(DeviceError::at(
            Call::Write,
            "pages of the node table",
            start,
        ))?)
    }
}
