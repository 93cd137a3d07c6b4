//! Snapshots, and scans of them.

use std::sync::Arc;

use bytes::Bytes;

use crate::check::logical::{Logical, logical_of};
use crate::error::{Error, Result};
use crate::key::range::KeyRange;
use crate::read::diff::{Diff, Span};
use crate::read::lookup::View;
use crate::read::scan::TreeScan;
use crate::tree::inner::Inner;
use crate::tree::window::Window;

/// A frozen view of the key space. Cheap to clone.
#[derive(Clone)]
pub struct Snapshot {
    pub(crate) view: View,
    pub(crate) inner: Arc<Inner>,
    pub(crate) window: Window,
}

impl Snapshot {
    /// The value of `key` in this view.
    ///
    /// # Errors
    /// As [`crate::Tree::get`].
    pub fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.view
            .get(&self.inner.store.nodes, &self.window.key(key))
    }

    /// Streams `[lo, hi)` of this view in key order. With an end the scan soon reads ahead up to
    /// there; without one, as far again as it has gone.
    #[must_use]
    pub fn scan(&self, lo: &[u8], hi: Option<&[u8]>) -> Scan {
        let hi = self.window.end(lo, hi);
        let range = KeyRange::new(Bytes::copy_from_slice(&self.window.key(lo)), hi);
        Scan {
            scan: TreeScan::of_view(&self.view, range),
            inner: self.inner.clone(),
            failed: false,
            window: self.window.clone(),
            shown: Vec::new(),
        }
    }

    /// Bytes of all keys and values of the whole tree that can be read, each clone counted in full.
    /// Where an answer would take too much work, it is an estimate and says so. If it `is_resident`,
    /// the device is not read: only nodes in memory are looked at.
    #[must_use]
    pub fn logical_bytes(&self, is_resident: bool) -> Logical {
        let top = self.inner.root.top_of(&self.view.root);
        logical_of(&self.inner.store, (&self.view, top), is_resident)
    }

    /// Streams the keys whose values differ between `a` in this view and `b` in `other`, a view of
    /// the same tree at another time or this one. Nodes that the two share, as clones do, are not
    /// read: the cost follows the differences and the nodes that were rewritten since the ranges
    /// were equal.
    ///
    /// # Errors
    /// `Invalid` when `other` is of another tree.
    pub fn diff_range(&self, a: &Span, other: &Snapshot, b: &Span) -> Result<Diff> {
        if !Arc::ptr_eq(&self.inner, &other.inner) {
            return Err(Error::Invalid("the two views are of different trees"));
        }
        Ok(Diff::new(
            self.inner.store.prefetch.clone(),
            [&self.view, &other.view],
            [&self.window.span(a), &other.window.span(b)],
        ))
    }
}

/// A streaming scan in key order. As an iterator it returns owned keys and values;
/// [`Scan::advance`] lends them and allocates nothing. After an error it ends.
///
/// ```
/// # use std::sync::Arc;
/// # use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree};
/// # use ramet_block::{Device, MemDevice};
/// # let dev: Arc<dyn Device> = Arc::new(MemDevice::new(16 << 20));
/// # Tree::format(&dev, &FormatOptions::default())?;
/// # let tree = Tree::open(dev, OpenOptions::default())?;
/// let mut batch = Batch::new();
/// batch.put("a", "one");
/// batch.put("b", "two");
/// tree.apply(batch)?;
/// let mut bytes = 0;
/// let mut scan = tree.scan(b"", None);
/// while scan.advance()? {
///     bytes += scan.key().len() + scan.value().len();
/// }
/// assert_eq!(bytes, 8);
/// # Ok::<(), ramet_betree::Error>(())
/// ```
pub struct Scan {
    scan: TreeScan,
    inner: Arc<Inner>,
    failed: bool,
    window: Window,
    /// The key as the window shows it, unless that is the whole key space.
    shown: Vec<u8>,
}

impl Scan {
    /// Announces that all of the range will be read: the first request to the device is already a
    /// long one.
    #[must_use]
    pub fn eager(mut self) -> Self {
        self.scan.read_ahead();
        self
    }

    /// Announces that the caller keeps the values itself, or does not want them again: they go past
    /// the cache of nodes, which keeps nodes that others want. About `len_bytes` of values are
    /// wanted: a leaf that is hardly longer may be read whole.
    #[must_use]
    pub fn drop_behind(mut self, len_bytes: usize) -> Self {
        self.scan.drop_behind(len_bytes);
        self
    }

    /// Goes to the next key; `false` at the end.
    ///
    /// # Errors
    /// `Io` and `Corrupt` when a node on the way cannot be read; the scan is over then.
    #[inline]
    pub fn advance(&mut self) -> Result<bool> {
        if self.failed {
            return Ok(false);
        }
        let done = self.scan.advance(&self.inner.store.prefetch);
        match done {
            Ok(true) if self.window.is_whole() => {}
            Ok(true) => self.window.show(self.scan.key(), &mut self.shown),
            _ => self.failed = true,
        }
        done
    }

    /// The key. Requires that the last [`Scan::advance`] returned `true`.
    ///
    /// # Panics
    /// Otherwise.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        match self.window.is_whole() {
            true => self.scan.key(),
            false => &self.shown,
        }
    }

    /// The value, under the same condition.
    ///
    /// # Panics
    /// As [`Scan::key`].
    #[must_use]
    pub fn value(&self) -> &[u8] {
        self.scan.value()
    }

    /// The value, owned, without a copy: as long as it lives its block of some 16 KiB stays in
    /// memory.
    ///
    /// # Panics
    /// As [`Scan::key`].
    #[must_use]
    pub fn value_bytes(&self) -> Bytes {
        self.scan.value_bytes()
    }
}

impl Iterator for Scan {
    type Item = Result<(Bytes, Bytes)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let next = self.scan.next(&self.inner.store.prefetch).transpose();
        self.failed = !matches!(next, Some(Ok(_)));
        next.map(|item| item.map(|(key, value)| (self.window.shown(key), value)))
    }
}
