//! The shadowing B+-tree (Rodeh, sections 3 and 4): handle, lookup, range, flush.
//! Changing it is in `edit.rs`, its bytes in `page.rs`.
//!
//! A page that is on disk is never overwritten. The first change after a flush copies the path from
//! the root to the page to new addresses (shadowing); later changes until the next flush work on
//! those copies in place. There are no links between leaves, so only the path is copied.
//!
//! A [`Root`] is a snapshot: a reader walks it without locks while the tree moves on, as long as
//! the space of its pages is not reused. A reader of the table that was overtaken starts again.
//!
//! Differences to the paper: the bounds b..3b of the paper are numbers of entries, and bytes here,
//! because records vary in size. A tree of the node table has no clones (section 5): the volume
//! clones nodes, by the counts in their records, and so a page has one pointer to it. Users of
//! `pages.rs` may have clones. The lock coupling of the paper is replaced by one writer beside
//! readers on snapshots, since the table has one writer, the checkpoint.

use std::sync::Arc;

use ramet_block::PageRef;

use crate::error::{Error, Result};
use crate::page::{Body, HEIGHT_MAX, KEY_MAX, LeafEntry, Link, Page, Shape};
use crate::sharing::Unshared;
use crate::store::{Batch, PageStore};

/// A B+-tree from byte strings to byte strings.
///
/// After an error of a changing method the handle must be dropped; the durable pages are untouched.
pub struct ShadowTree<S = Unshared> {
    /// Where the pages lie.
    pub store: Arc<PageStore<S>>,
    /// Sizes of the pages.
    pub shape: Shape,
    /// The newest root, written or not.
    pub root: Root,
}

/// A key and its value.
pub type KeyValue = (Box<[u8]>, Box<[u8]>);

/// The root of a tree; none when it is empty.
pub type Root = Option<Link>;

impl<S> ShadowTree<S> {
    /// The tree whose root page is `root`. Reads nothing.
    #[must_use]
    pub fn open(store: Arc<PageStore<S>>, shape: Shape, root: PageRef) -> Self {
        let root = (!root.is_none()).then_some(Link::Disk(root));
        Self { store, shape, root }
    }

    /// The value of `key`.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Corrupt`].
    pub fn lookup(&self, key: &[u8]) -> Result<Option<Box<[u8]>>> {
        lookup(&self.store, &self.shape, &self.root, key)
    }

    /// The entry with the largest key that is not above `key`.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Corrupt`].
    pub fn floor(&self, key: &[u8]) -> Result<Option<KeyValue>> {
        let Some(mut link) = self.root.clone() else {
            return Ok(None);
        };
        let (mut height, mut left) = (None, None);
        loop {
            let page = self.store.resolve(&self.shape, &link, height)?;
            match &page.body {
                Body::Index(entries) => {
                    let at = route(&page, key);
                    if at > 0 {
                        left = Some((entries[at - 1].link.clone(), page.height - 1));
                    }
                    height = Some(page.height - 1);
                    link = entries[at].link.clone();
                }
                Body::Leaf(entries) => {
                    let at = entries.partition_point(|entry| *entry.key <= *key);
                    return match (at, left) {
                        (0, Some((link, height))) => self.last(link, height),
                        (0, None) => Ok(None),
                        (at, _) => Ok(Some(pair(&entries[at - 1]))),
                    };
                }
            }
        }
    }

    /// The last entry under `link`. Leaves of a tree of several pages are never empty.
    fn last(&self, mut link: Link, height: u8) -> Result<Option<KeyValue>> {
        let mut height = Some(height);
        loop {
            let page = self.store.resolve(&self.shape, &link, height)?;
            match &page.body {
                Body::Leaf(entries) => return Ok(entries.last().map(pair)),
                Body::Index(entries) => {
                    let Some(entry) = entries.last() else {
                        return Ok(None);
                    };
                    height = Some(page.height - 1);
                    link = entry.link.clone();
                }
            }
        }
    }

    /// The entries from `start` on, in order. The iterator works on a snapshot.
    #[must_use]
    pub fn range(&self, start: &[u8]) -> Range<'_, S> {
        let pending = self.root.clone().map(|link| (link, start.into()));
        Range {
            tree: self,
            stack: Vec::new(),
            pending,
            bound: Box::default(),
        }
    }

    /// Writes every dirty page, children first, each once, and returns the root for a checkpoint to
    /// name. Not durable before the device is synced.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn flush(&mut self) -> Result<PageRef> {
        let Some(root) = &mut self.root else {
            return Ok(PageRef::NONE);
        };
        let mut batch = Batch::new(&self.store);
        let at = flush_link(&self.store, &self.shape, root, &mut batch)?;
        batch.write()?;
        Ok(at)
    }

    pub(crate) fn check_sizes(&self, key: &[u8], value: &[u8]) -> Result<()> {
        let value_max = self.shape.value_max();
        if key.len() > KEY_MAX {
            return Err(Error::TooLong {
                what: "key",
                len: key.len(),
                max: KEY_MAX,
            });
        }
        if value.len() > value_max {
            return Err(Error::TooLong {
                what: "value",
                len: value.len(),
                max: value_max,
            });
        }
        Ok(())
    }
}

fn flush_link<S>(
    store: &PageStore<S>,
    shape: &Shape,
    link: &mut Link,
    batch: &mut Batch<'_, S>,
) -> Result<PageRef> {
    let page = match link {
        Link::Disk(at) => return Ok(*at),
        Link::Dirty(page) => page,
    };
    let dirty = Arc::make_mut(page);
    if let Body::Index(entries) = &mut dirty.body {
        for entry in entries {
            flush_link(store, shape, &mut entry.link, batch)?;
        }
    }
    let bytes = dirty.encode(shape);
    let at = PageRef {
        addr: dirty.addr,
        copy: dirty.copy,
        checksum: ramet_block::checksum(&bytes),
    };
    batch.push(at, bytes)?;
    store.cache_page(at, page.clone());
    *link = Link::Disk(at);
    Ok(at)
}

/// Looks `key` up in the snapshot `root`.
pub(crate) fn lookup<S>(
    store: &PageStore<S>,
    shape: &Shape,
    root: &Root,
    key: &[u8],
) -> Result<Option<Box<[u8]>>> {
    let Some(root) = root else { return Ok(None) };
    let mut page = store.resolve(shape, root, None)?;
    loop {
        page = match &page.body {
            Body::Leaf(entries) => {
                let found = entries.binary_search_by(|entry| (*entry.key).cmp(key));
                return Ok(found.ok().map(|at| entries[at].value.clone()));
            }
            Body::Index(entries) => {
                let link = &entries[route(&page, key)].link;
                store.resolve(shape, link, Some(page.height - 1))?
            }
        };
    }
}

/// The child of an index page that `key` belongs to. Index pages are never empty.
pub(crate) fn route(page: &Page, key: &[u8]) -> usize {
    match &page.body {
        Body::Index(entries) => entries
            .partition_point(|entry| *entry.key <= *key)
            .saturating_sub(1),
        Body::Leaf(_) => 0,
    }
}

fn pair(entry: &LeafEntry) -> KeyValue {
    (entry.key.clone(), entry.value.clone())
}

/// Entries of a tree in order; see [`ShadowTree::range`].
///
/// The keys of the pointers that are followed ascend. So a tree that is forged to name one page
/// many times ends the iteration with an error.
pub struct Range<'a, S = Unshared> {
    tree: &'a ShadowTree<S>,
    stack: Vec<(Arc<Page>, usize)>,
    pending: Option<(Link, Box<[u8]>)>,
    /// Key of the last pointer that was followed.
    bound: Box<[u8]>,
}

impl<S> Range<'_, S> {
    fn descend(&mut self, link: Link, start: &[u8]) -> Result<()> {
        let mut link = link;
        let mut height = self.stack.last().map(|(page, _)| page.height - 1);
        loop {
            let page = self.tree.store.resolve(&self.tree.shape, &link, height)?;
            match &page.body {
                Body::Leaf(entries) => {
                    let at = entries.partition_point(|entry| *entry.key < *start);
                    self.stack.push((page, at));
                    return Ok(());
                }
                Body::Index(entries) => {
                    let at = route(&page, start);
                    if *entries[0].key < *self.bound {
                        return Err(self.out_of_order(&page));
                    }
                    self.bound.clone_from(&entries[at].key);
                    link = entries[at].link.clone();
                    height = Some(page.height - 1);
                    self.stack.push((page, at + 1));
                }
            }
            debug_assert!(self.stack.len() <= usize::from(HEIGHT_MAX) + 1, "S2");
        }
    }

    fn out_of_order(&self, page: &Page) -> Error {
        let name = self.tree.shape.structure.name();
        Error::corrupt(name, page.addr, "S1: pointers out of order")
    }

    fn step(&mut self) -> Result<Option<KeyValue>> {
        if let Some((link, start)) = self.pending.take() {
            self.descend(link, &start)?;
        }
        while let Some((page, at)) = self.stack.last_mut() {
            let child = match &page.body {
                Body::Leaf(entries) => match entries.get(*at) {
                    Some(entry) => {
                        *at += 1;
                        return Ok(Some(pair(entry)));
                    }
                    None => None,
                },
                Body::Index(entries) => entries
                    .get(*at)
                    .map(|entry| (entry.key.clone(), entry.link.clone())),
            };
            *at += 1;
            match child {
                Some((key, link)) => {
                    if key <= self.bound {
                        let page = page.clone();
                        return Err(self.out_of_order(&page));
                    }
                    self.bound = key;
                    self.descend(link, &[])?;
                }
                None => drop(self.stack.pop()),
            }
        }
        Ok(None)
    }
}

impl<S> Iterator for Range<'_, S> {
    type Item = Result<KeyValue>;

    /// The next entry. After an error the iterator ends.
    fn next(&mut self) -> Option<Self::Item> {
        let next = self.step();
        if next.is_err() {
            self.stack.clear();
        }
        next.transpose()
    }
}
