//! Insert and remove (Rodeh, sections 4.3 and 4.5).
//!
//! Both walk down once. Before a step into a child, the child is made safe: a child that could
//! overflow is split, a child that could become too empty is merged with a neighbour or takes
//! entries from it. So no change travels back up, and a page is complete when the walk leaves it.
//!
//! Pages hold bytes, not equal entries. With E the largest entry and `C >= 4E` the capacity: *full*
//! means used > `C - E`, so one more entry always fits a page that is not. A split leaves at least
//! `(C - 2E) / 2 >= C/4` on either side. *Underfull* means used < C/4. An underfull page is merged
//! with its neighbour when the sum is at most `C - E`. Otherwise both share their entries out
//! evenly, at least C/4 each. So away from the root a leaf holds `C/4 - E` or more after a removal
//! (the next walk through it makes it safe), an index page at least two children.
//!
//! An error in the middle leaves a well-formed tree of unchanged contents: allocation, the one step
//! that can fail, comes first in each change. Keeps S1 to S6.

use std::sync::Arc;

use crate::damaged::DamagedPage;
use crate::error::Result;
use crate::page::{Body, Entry, IndexEntry, LeafEntry, Link, Page, Shape};
use crate::sharing::Sharing;
use crate::store::PageStore;
use crate::tree::{ShadowTree, route};

impl<S: Sharing> ShadowTree<S> {
    /// Sets `key` to `value`, and says whether that changed anything.
    ///
    /// # Errors
    /// [`crate::Error::TooLong`], `NoSpace` for the copy of a page, `Io` or `Corrupt`.
    pub fn insert(&mut self, key: &[u8], value: &[u8]) -> Result<bool> {
        self.check_sizes(key, value)?;
        // A lookup comes first: it brings the path into memory, and the same value shadows nothing.
        if self.lookup(key)?.is_some_and(|old| *old == *value) {
            return Ok(false);
        }
        if self.root.is_none() {
            let place = self.store.alloc_page(&self.shape)?;
            let page = Page::new(place, 0, Body::Leaf(Vec::new()));
            self.root = Some(Link::Dirty(Arc::new(page)));
        }
        let leaf = self.descend_to_change(key)?;
        let Body::Leaf(entries) = &mut leaf.body else {
            unreachable!("S2: height 0 is a leaf")
        };
        match entries.binary_search_by(|entry| (*entry.key).cmp(key)) {
            Ok(at) => {
                leaf.used = leaf.used - entries[at].value.len() + value.len();
                entries[at].value = value.into();
            }
            Err(at) => {
                let entry = LeafEntry {
                    key: key.into(),
                    value: value.into(),
                };
                leaf.used += entry.size();
                entries.insert(at, entry);
            }
        }
        Ok(true)
    }

    /// Removes `key`, and says whether it was there.
    ///
    /// # Errors
    /// `NoSpace` for the copy of a page, `Io` or `Corrupt`.
    pub fn remove(&mut self, key: &[u8]) -> Result<bool> {
        if self.lookup(key)?.is_none() {
            return Ok(false);
        }
        let leaf = self.descend_to_change(key)?;
        let Body::Leaf(entries) = &mut leaf.body else {
            unreachable!("S2: height 0 is a leaf")
        };
        if let Ok(at) = entries.binary_search_by(|entry| (*entry.key).cmp(key)) {
            leaf.used -= entries.remove(at).size();
        }
        // Only a root leaf can run empty.
        if entries.is_empty()
            && let Some(root) = self.root.take()
        {
            self.store.free_page(&self.shape, &root);
        }
        Ok(true)
    }

    /// Copies the path to `page` to new places, if the tree still has the page and a copy of it is bad.
    /// Says whether that is so.
    ///
    /// # Errors
    /// `NoSpace` for the copy of a page, `Io` or `Corrupt`.
    pub(crate) fn renew(&mut self, page: &DamagedPage) -> Result<bool> {
        if !self.has(page)? || !self.is_damaged(page) {
            return Ok(false);
        }
        let (store, shape) = (&*self.store, &self.shape);
        let mut link = self.root.as_mut().expect("`has` walked from there");
        let mut height = None;
        loop {
            let owned = own(store, shape, link, height)?;
            if owned.height <= page.height {
                return Ok(true);
            }
            let at = route(owned, &page.first_key);
            height = Some(owned.height - 1);
            link = link_at(owned, at);
        }
    }

    /// Whether a copy of `page` is bad. A walk that was overtaken by commits may have taken a page that
    /// was written over for a bad one.
    fn is_damaged(&self, page: &DamagedPage) -> bool {
        let read = |addr| self.store.read_copy(&self.shape, page.at, addr);
        page.at.copies().any(|addr| read(addr).is_err())
    }

    /// Whether the pointer to `page` stands where the page belongs.
    fn has(&self, page: &DamagedPage) -> Result<bool> {
        let Some(mut link) = self.root.clone() else {
            return Ok(false);
        };
        let mut height = None;
        loop {
            if matches!(link, Link::Disk(at) if at == page.at) {
                return Ok(true);
            }
            let above = self.store.resolve(&self.shape, &link, height)?;
            let Body::Index(entries) = &above.body else {
                return Ok(false);
            };
            height = Some(above.height - 1);
            link = entries[route(&above, &page.first_key)].link.clone();
        }
    }

    /// The leaf for `key`, shadowed with the whole path to it, with room for any entry.
    fn descend_to_change(&mut self, key: &[u8]) -> Result<&mut Page> {
        let (store, shape) = (&*self.store, &self.shape);
        let root = self.root.as_mut().expect("callers make sure of a root");
        if own(store, shape, root, None)?.is_full(shape) {
            grow(store, shape, root)?;
        }
        // A root of two children that were merged is replaced by the one they became.
        loop {
            let page = own(store, shape, root, None)?;
            if page.height == 0 {
                break;
            }
            prepare(store, shape, page, key)?;
            let Body::Index(entries) = &mut page.body else {
                break;
            };
            if entries.len() > 1 {
                break;
            }
            let Some(only) = entries.pop() else { break };
            let old = std::mem::replace(root, only.link);
            store.free_page(shape, &old);
        }
        let mut page = own(store, shape, root, None)?;
        while page.height > 0 {
            let at = prepare(store, shape, page, key)?;
            let below = page.height - 1;
            page = own(store, shape, link_at(page, at), Some(below))?;
        }
        Ok(page)
    }
}

fn link_at(page: &mut Page, at: usize) -> &mut Link {
    match &mut page.body {
        Body::Index(entries) => &mut entries[at].link,
        Body::Leaf(_) => unreachable!("S2: an index page"),
    }
}

/// Makes the page behind `link` dirty, copying it if it is not, and lets the caller change it. The
/// page that holds `link` is dirty already.
fn own<'a, S: Sharing>(
    store: &PageStore<S>,
    shape: &Shape,
    link: &'a mut Link,
    height: Option<u8>,
) -> Result<&'a mut Page> {
    if matches!(link, Link::Disk(_)) {
        let old = store.resolve(shape, link, height)?;
        let copy = old.shadow(store.alloc_page(shape)?);
        if !store.sharing.unshare(&old) {
            store.free_page(shape, link);
        }
        *link = Link::Dirty(Arc::new(copy));
    }
    match link {
        Link::Dirty(page) => Ok(Arc::make_mut(page)),
        Link::Disk(_) => unreachable!("it was made dirty above"),
    }
}

/// Splits a full root under a new root.
fn grow<S: Sharing>(store: &PageStore<S>, shape: &Shape, root: &mut Link) -> Result<()> {
    let place = store.alloc_page(shape)?;
    let left = own(store, shape, root, None)?;
    let height = left.height + 1;
    let right = match split(store, shape, left) {
        Ok(right) => right,
        Err(error) => {
            store.free_fresh(shape, place);
            return Err(error);
        }
    };
    let second = IndexEntry {
        key: right.first_key().into(),
        link: Link::Dirty(Arc::new(right)),
    };
    let first = IndexEntry {
        key: Box::default(),
        link: root.clone(),
    };
    *root = Link::Dirty(Arc::new(Page::new(
        place,
        height,
        Body::Index(vec![first, second]),
    )));
    Ok(())
}

/// Makes the child of `page` that `key` belongs to safe to change, and returns its position.
/// `page` has room for one more entry.
fn prepare<S: Sharing>(
    store: &PageStore<S>,
    shape: &Shape,
    page: &mut Page,
    key: &[u8],
) -> Result<usize> {
    let at = route(page, key);
    let below = page.height - 1;
    let Body::Index(entries) = &mut page.body else {
        unreachable!("S2: an index page")
    };
    let child = own(store, shape, &mut entries[at].link, Some(below))?;
    if child.is_full(shape) {
        let right = split(store, shape, child)?;
        let entry = IndexEntry {
            key: right.first_key().into(),
            link: Link::Dirty(Arc::new(right)),
        };
        page.used += entry.size();
        entries.insert(at + 1, entry);
    } else if child.is_underfull(shape) && entries.len() > 1 {
        let left_at = if at + 1 < entries.len() { at } else { at - 1 };
        own(store, shape, &mut entries[left_at].link, Some(below))?;
        own(store, shape, &mut entries[left_at + 1].link, Some(below))?;
        let (head, tail) = entries.split_at_mut(left_at + 1);
        let left = own(store, shape, &mut head[left_at].link, Some(below))?;
        let right = own(store, shape, &mut tail[0].link, Some(below))?;
        even_out(shape, left, right);
        let (right_place, right_len) = (right.place(), right.len());
        let bound: Box<[u8]> = right.first_key().into();
        page.used -= tail[0].size();
        if right_len == 0 {
            store.free_fresh(shape, right_place);
            entries.remove(left_at + 1);
        } else {
            tail[0].key = bound;
            page.used += tail[0].size();
        }
    }
    Ok(route(page, key))
}

/// Moves the upper half of `page` to a new page and returns that.
fn split<S>(store: &PageStore<S>, shape: &Shape, page: &mut Page) -> Result<Page> {
    let place = store.alloc_page(shape)?;
    let body = match &mut page.body {
        Body::Leaf(entries) => Body::Leaf(entries.split_off(middle(entries))),
        Body::Index(entries) => Body::Index(entries.split_off(middle(entries))),
    };
    let right = Page::new(place, page.height, body);
    page.used -= right.used;
    Ok(right)
}

/// Merges `right` into `left` if the result leaves room for an entry, else shares out evenly.
fn even_out(shape: &Shape, left: &mut Page, right: &mut Page) {
    let total = left.used + right.used;
    let merge = total + shape.entry_max(left.height) <= shape.capacity();
    left.used = match (&mut left.body, &mut right.body) {
        (Body::Leaf(a), Body::Leaf(b)) => share_out(a, b, merge),
        (Body::Index(a), Body::Index(b)) => share_out(a, b, merge),
        _ => unreachable!("S2: siblings have one height"),
    };
    right.used = total - left.used;
}

/// Bytes in `left` afterwards.
fn share_out<E: Entry>(left: &mut Vec<E>, right: &mut Vec<E>, merge: bool) -> usize {
    left.append(right);
    if !merge {
        *right = left.split_off(middle(left));
    }
    left.iter().map(Entry::size).sum()
}

/// Where to cut so that both sides are about equally long in bytes.
fn middle<E: Entry>(entries: &[E]) -> usize {
    let total: usize = entries.iter().map(Entry::size).sum();
    let mut sum = 0;
    for (at, entry) in entries.iter().enumerate() {
        let size = entry.size();
        // Cut before this entry when that is nearer to the middle than cutting after it.
        if 2 * sum + size >= total && at > 0 {
            return at;
        }
        sum += size;
    }
    entries.len() - 1
}
