//! Space, cache and counts that the trees of a forest share.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use quick_cache::sync::Cache;
use ramet_block::{Device, Extent, PageRef, checksum};

use super::error::{Error, Result};
use super::page::{Body, Link, Page, Shape};
use super::space::Space;

/// Memory of a page of 8 KiB with its entries apart, about.
const PAGE_MEMORY_BYTES: usize = 25 << 10;

/// Dirty pages are written in batches of about this many bytes.
const BATCH_BYTES: usize = 4 << 20;

/// Device, cache, allocator and counts.
pub struct PageStore {
    device: Arc<dyn Device>,
    usable: Extent,
    cache: Cache<PageRef, Arc<Page>>,
    pub space: Mutex<Space>,
    counts: Mutex<Counts>,
    log: Mutex<Vec<(Extent, i8)>>,
}

#[derive(Default)]
struct Counts {
    over_one: HashMap<u64, u64>,
    changed: BTreeSet<u64>,
}

impl PageStore {
    /// A store over `usable` in which nothing is free and no page is shared yet.
    pub fn new(device: Arc<dyn Device>, usable: Extent, cache_bytes: usize) -> Self {
        Self {
            device,
            usable,
            cache: Cache::new((cache_bytes / PAGE_MEMORY_BYTES).max(64)),
            space: Mutex::default(),
            counts: Mutex::default(),
            log: Mutex::default(),
        }
    }

    pub fn usable(&self) -> Extent {
        self.usable
    }

    /// The page that `link` points to, which must have `height` if that is known.
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

    fn read(&self, shape: &Shape, at: PageRef) -> Result<Arc<Page>> {
        let name = shape.structure.name();
        let extent = Extent::new(at.addr, shape.page_bytes.into());
        extent
            .validate(self.usable)
            .map_err(Error::extent(name, at.addr))?;
        let mut bytes = vec![0; shape.page_bytes as usize];
        self.device.read_at(at.addr, &mut bytes)?;
        let found = checksum(&bytes);
        if found != at.checksum {
            let detail = format!("checksum {found:#018x}, expected {:#018x}", at.checksum);
            return Err(Error::corrupt(name, at.addr, detail));
        }
        let page = Arc::new(Page::decode(shape, at.addr, &bytes)?);
        // The checksum is part of the cache key, so a page left behind at a reused address is
        // never found again.
        self.cache.insert(at, page.clone());
        Ok(page)
    }

    pub fn cache_page(&self, at: PageRef, page: Arc<Page>) {
        self.cache.insert(at, page);
    }

    pub fn alloc_page(&self, shape: &Shape) -> Result<u64> {
        let extent = self.space.lock().alloc(shape.page_bytes.into())?;
        self.log.lock().push((extent, -1));
        Ok(extent.addr)
    }

    /// Frees a page that was never flushed.
    pub fn free_fresh(&self, shape: &Shape, addr: u64) {
        let extent = Extent::new(addr, shape.page_bytes.into());
        self.log.lock().push((extent, 1));
        self.space.lock().free_now(extent);
    }

    /// Frees a page that a durable commit may name.
    fn free_flushed(&self, shape: &Shape, addr: u64) {
        let extent = Extent::new(addr, shape.page_bytes.into());
        self.log.lock().push((extent, 1));
        self.space.lock().free_at_commit(extent);
    }

    /// Allocations (-1) and freeings (+1) of pages since the last call.
    pub fn take_log(&self) -> Vec<(Extent, i8)> {
        std::mem::take(&mut *self.log.lock())
    }

    pub fn count(&self, addr: u64) -> u64 {
        self.counts.lock().over_one.get(&addr).copied().unwrap_or(1)
    }

    pub fn add_reference(&self, addr: u64) {
        let mut counts = self.counts.lock();
        *counts.over_one.entry(addr).or_insert(1) += 1;
        counts.changed.insert(addr);
    }

    /// Takes one reference away, unless it is the last. Says whether it did.
    pub fn drop_shared_reference(&self, addr: u64) -> bool {
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
    pub fn load_count(&self, addr: u64, count: u64) {
        self.counts.lock().over_one.insert(addr, count);
    }

    /// Addresses whose count changed since the last call, with the count.
    pub fn take_changed_counts(&self) -> Vec<(u64, u64)> {
        let mut counts = self.counts.lock();
        let changed = std::mem::take(&mut counts.changed);
        let count = |addr: u64| counts.over_one.get(&addr).copied().unwrap_or(1);
        changed
            .into_iter()
            .map(|addr| (addr, count(addr)))
            .collect()
    }

    /// Lets go of `page`, which a writer replaces by a copy: a shared page loses one reference and
    /// its children, now named by the copy as well, gain one; an unshared page is freed.
    pub fn release_for_copy(&self, shape: &Shape, link: &Link, page: &Page) {
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

    pub fn free_page(&self, shape: &Shape, link: &Link) {
        match link {
            Link::Dirty(page) if !page.is_written() => self.free_fresh(shape, page.addr),
            link => self.free_flushed(shape, link.addr()),
        }
    }
}

/// Collects encoded pages and writes neighbours with one call.
pub struct Batch<'a> {
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

    /// Adds the bytes of the page at `addr`.
    pub fn push(&mut self, addr: u64, bytes: Vec<u8>) -> Result<()> {
        self.bytes += bytes.len();
        self.pages.push((addr, bytes));
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
