//! Pages of the shadowing B+-tree, in memory and on disk.
//!
//! On disk a page is `page_bytes` long: a 24-byte header, then `count` entries, then zeroes. Its
//! checksum is not in the page but with the pointer to it. A page may be kept twice: both copies hold
//! the same bytes, with the address of the first.
//!
//! ```text
//! 0 magic "RMTp" | 4 structure u8 | 5 height u8 | 6 count u16 | 8 own address u64
//! 16 entry bytes u32 | 20 reserved u32 | 24 entries ...
//! leaf entry   (height 0):  key length u8, value length u16, key, value
//! index entry  (height > 0): key length u8, key, child address u64, address of its second copy u64
//!                            (0: none), child checksum u64
//! ```
//!
//! In memory a child is a [`Link`]: either the pointer on disk, or the dirty page itself. Pages are
//! immutable once shared (`Arc`); a writer copies a page that a reader still sees.

use std::sync::Arc;

use ramet_block::{BLOCK_BYTES, PageRef, Reader, Writer};

use crate::error::{Error, Result};

pub(crate) const HEADER_BYTES: usize = 24;
const MAGIC: u32 = u32::from_le_bytes(*b"RMTp");

/// Longest key in bytes.
pub const KEY_MAX: usize = 64;

/// No tree that fits a device is higher: 100 entries per page and 2^52 pages need 8 levels.
pub(crate) const HEIGHT_MAX: u8 = 24;

/// The tree that a page belongs to, with its number on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Structure {
    /// The node table.
    NodeTable = 1,
    /// The free-space map.
    SpaceMap = 2,
}

impl Structure {
    /// How messages call it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NodeTable => "node table page",
            Self::SpaceMap => "space map page",
        }
    }
}

/// Sizes of one tree's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// The tree of the pages.
    pub structure: Structure,
    /// Bytes per page, a multiple of [`BLOCK_BYTES`].
    pub page_bytes: u32,
    /// Most entry bytes in a page. Tests set it low to get high trees from few entries.
    pub capacity_bytes: u32,
}

impl Shape {
    /// Pages of `page_bytes` used in full.
    ///
    /// # Panics
    /// When `page_bytes` is not a positive multiple of [`BLOCK_BYTES`].
    #[must_use]
    pub const fn new(structure: Structure, page_bytes: u32) -> Self {
        assert!(page_bytes > 0 && (page_bytes as u64).is_multiple_of(BLOCK_BYTES));
        Self {
            structure,
            page_bytes,
            capacity_bytes: page_bytes - HEADER_BYTES as u32,
        }
    }

    /// The same pages, but never more than `capacity_bytes` of entries in one.
    ///
    /// # Panics
    /// When `capacity_bytes` is below 704, where a quarter of an index page might hold fewer than
    /// three entries, or above the room of a page.
    #[cfg(test)]
    #[must_use]
    pub const fn with_capacity(self, capacity_bytes: u32) -> Self {
        assert!(capacity_bytes >= 704 && capacity_bytes <= self.page_bytes - HEADER_BYTES as u32);
        Self {
            capacity_bytes,
            ..self
        }
    }

    /// Longest value in bytes. Four of the largest entries fit a page, on which the bounds of
    /// splitting and fixing rest.
    #[must_use]
    pub const fn value_max(&self) -> usize {
        self.leaf_entry_max() - LeafEntry::FIXED - KEY_MAX
    }

    const fn leaf_entry_max(&self) -> usize {
        self.capacity_bytes as usize / 4
    }

    /// Size of the largest entry a page of this height may have to take.
    pub(crate) const fn entry_max(&self, height: u8) -> usize {
        if height == 0 {
            self.leaf_entry_max()
        } else {
            IndexEntry::FIXED + KEY_MAX
        }
    }

    pub(crate) const fn capacity(&self) -> usize {
        self.capacity_bytes as usize
    }
}

/// An entry of a page of either kind.
pub(crate) trait Entry {
    fn size(&self) -> usize;
    fn key(&self) -> &[u8];
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeafEntry {
    pub key: Box<[u8]>,
    pub value: Box<[u8]>,
}

#[derive(Debug, Clone)]
pub(crate) struct IndexEntry {
    /// Lower bound of the child's keys, equal to the first key of an index child. The first entry
    /// of a leftmost page has the empty key.
    pub key: Box<[u8]>,
    pub link: Link,
}

impl LeafEntry {
    const FIXED: usize = 3;
}

impl IndexEntry {
    const FIXED: usize = 25;
}

impl Entry for LeafEntry {
    fn size(&self) -> usize {
        Self::FIXED + self.key.len() + self.value.len()
    }

    fn key(&self) -> &[u8] {
        &self.key
    }
}

impl Entry for IndexEntry {
    fn size(&self) -> usize {
        Self::FIXED + self.key.len()
    }

    fn key(&self) -> &[u8] {
        &self.key
    }
}

/// A pointer to a child or root page.
#[derive(Debug, Clone)]
pub enum Link {
    /// On disk, unchanged since.
    Disk(PageRef),
    /// Shadowed since the last flush; its address is assigned, its bytes are not written.
    Dirty(Arc<Page>),
}

impl Link {
    /// The address of the page, of its first copy if there are two.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.place().addr
    }

    pub(crate) fn place(&self) -> Place {
        match self {
            Self::Disk(page) => Place {
                addr: page.addr,
                copy: page.copy,
            },
            Self::Dirty(page) => page.place(),
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) enum Body {
    Leaf(Vec<LeafEntry>),
    Index(Vec<IndexEntry>),
}

/// Addresses of a page that is not written yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub addr: u64,
    /// The second copy; 0 when there is none.
    pub copy: u64,
}

impl Place {
    /// Addresses of the copies, the first one first.
    pub fn copies(self) -> impl Iterator<Item = u64> {
        let copy = Some(self.copy).filter(|addr| *addr != 0);
        [Some(self.addr), copy].into_iter().flatten()
    }
}

/// One page.
#[derive(Debug, Clone)]
pub struct Page {
    /// Address, of the first copy if there are two.
    pub addr: u64,
    /// Address of the second copy, 0 when there is none. A page that was read from the device has 0
    /// here: the pointer to it knows.
    pub(crate) copy: u64,
    /// Steps to the leaves below: 0 for a leaf.
    pub height: u8,
    pub(crate) body: Body,
    /// Sum of the entries' sizes on disk.
    pub(crate) used: usize,
}

impl Page {
    pub(crate) fn new(place: Place, height: u8, body: Body) -> Self {
        let used = match &body {
            Body::Leaf(entries) => entries.iter().map(Entry::size).sum(),
            Body::Index(entries) => entries.iter().map(Entry::size).sum(),
        };
        Self {
            addr: place.addr,
            copy: place.copy,
            height,
            body,
            used,
        }
    }

    /// A copy with a place of its own.
    pub(crate) fn shadow(&self, place: Place) -> Self {
        Self {
            addr: place.addr,
            copy: place.copy,
            ..self.clone()
        }
    }

    pub(crate) fn place(&self) -> Place {
        Place {
            addr: self.addr,
            copy: self.copy,
        }
    }

    /// The pointers to the children, in the order of keys; none of a leaf.
    pub fn children(&self) -> impl Iterator<Item = &Link> {
        let entries: &[IndexEntry] = match &self.body {
            Body::Index(entries) => entries,
            Body::Leaf(_) => &[],
        };
        entries.iter().map(|entry| &entry.link)
    }

    pub(crate) fn len(&self) -> usize {
        match &self.body {
            Body::Leaf(entries) => entries.len(),
            Body::Index(entries) => entries.len(),
        }
    }

    pub(crate) fn first_key(&self) -> &[u8] {
        match &self.body {
            Body::Leaf(entries) => entries.first().map_or(&[], |entry| &entry.key),
            Body::Index(entries) => entries.first().map_or(&[], |entry| &entry.key),
        }
    }

    /// Whether the largest entry might not fit any more.
    pub(crate) fn is_full(&self, shape: &Shape) -> bool {
        self.used + shape.entry_max(self.height) > shape.capacity()
    }

    /// Whether losing one more entry would leave too little.
    pub(crate) fn is_underfull(&self, shape: &Shape) -> bool {
        self.used < shape.capacity() / 4
    }

    pub(crate) fn encode(&self, shape: &Shape) -> Vec<u8> {
        let mut w = Writer::with_capacity(shape.page_bytes as usize);
        w.u32(MAGIC);
        w.u8(shape.structure as u8);
        w.u8(self.height);
        w.u16(u16::try_from(self.len()).expect("a page holds fewer than 65536 entries"));
        w.u64(self.addr);
        w.u32(u32::try_from(self.used).expect("a page is smaller than 4 GiB"));
        w.u32(0);
        debug_assert_eq!(w.len(), HEADER_BYTES);
        let key_len = |key: &[u8]| u8::try_from(key.len()).expect("keys are at most 64 bytes");
        match &self.body {
            Body::Leaf(entries) => {
                for entry in entries {
                    w.u8(key_len(&entry.key));
                    w.u16(u16::try_from(entry.value.len()).expect("values fit a page"));
                    w.raw(&entry.key);
                    w.raw(&entry.value);
                }
            }
            Body::Index(entries) => {
                for entry in entries {
                    w.u8(key_len(&entry.key));
                    w.raw(&entry.key);
                    match &entry.link {
                        Link::Disk(page) => page.encode(&mut w),
                        Link::Dirty(_) => unreachable!("S7: children are flushed before parents"),
                    }
                }
            }
        }
        assert_eq!(
            w.len(),
            HEADER_BYTES + self.used,
            "S3: entry bytes are counted wrongly"
        );
        w.pad_to(shape.page_bytes as usize);
        w.into_vec()
    }

    /// Decodes the page read from `addr`, whose checksum has been compared already.
    pub(crate) fn decode(shape: &Shape, addr: u64, bytes: &[u8]) -> Result<Self> {
        let name = shape.structure.name();
        let corrupt = |detail: String| Error::corrupt(name, addr, detail);
        let malformed = Error::malformed(name, addr);
        let mut r = Reader::new(bytes);
        let (magic, structure) = (r.u32().map_err(&malformed)?, r.u8().map_err(&malformed)?);
        if magic != MAGIC || structure != shape.structure as u8 {
            return Err(corrupt(format!("magic {magic:#x}, structure {structure}")));
        }
        let (height, count) = (r.u8().map_err(&malformed)?, r.u16().map_err(&malformed)?);
        let own_addr = r.u64().map_err(&malformed)?;
        let used = r.u32().map_err(&malformed)? as usize;
        let reserved = r.u32().map_err(&malformed)?;
        if own_addr != addr || height > HEIGHT_MAX || used > shape.capacity() || reserved != 0 {
            return Err(corrupt(format!(
                "header says address {own_addr:#x}, height {height}, {used} entry bytes"
            )));
        }
        let place = Place { addr, copy: 0 };
        let mut entries = Reader::new(r.take(used).map_err(&malformed)?);
        let page = if height == 0 {
            let body = (0..count).map(|_| decode_leaf_entry(&mut entries, shape));
            Self::new(
                place,
                0,
                Body::Leaf(body.collect::<Result<_, _>>().map_err(&malformed)?),
            )
        } else {
            let body = (0..count).map(|_| decode_index_entry(&mut entries));
            Self::new(
                place,
                height,
                Body::Index(body.collect::<Result<_, _>>().map_err(&malformed)?),
            )
        };
        entries.finish().map_err(&malformed)?;
        r.finish_reserved().map_err(&malformed)?;
        let ordered = match &page.body {
            Body::Leaf(entries) => is_ordered(entries),
            Body::Index(entries) => is_ordered(entries) && !entries.is_empty(),
        };
        if !ordered {
            return Err(corrupt(
                "keys out of order or an index without entries".into(),
            ));
        }
        Ok(page)
    }
}

fn is_ordered<E: Entry>(entries: &[E]) -> bool {
    entries.windows(2).all(|pair| pair[0].key() < pair[1].key())
}

fn decode_key(r: &mut Reader<'_>, len: u8) -> Result<Box<[u8]>, ramet_block::DecodeError> {
    if usize::from(len) > KEY_MAX {
        return Err(ramet_block::DecodeError::TooLong {
            len: len.into(),
            max: KEY_MAX as u64,
        });
    }
    Ok(r.take(len.into())?.into())
}

fn decode_leaf_entry(
    r: &mut Reader<'_>,
    shape: &Shape,
) -> Result<LeafEntry, ramet_block::DecodeError> {
    let (key_len, value_len) = (r.u8()?, usize::from(r.u16()?));
    if value_len > shape.value_max() {
        let max = shape.value_max() as u64;
        return Err(ramet_block::DecodeError::TooLong {
            len: value_len as u64,
            max,
        });
    }
    Ok(LeafEntry {
        key: decode_key(r, key_len)?,
        value: r.take(value_len)?.into(),
    })
}

fn decode_index_entry(r: &mut Reader<'_>) -> Result<IndexEntry, ramet_block::DecodeError> {
    let key_len = r.u8()?;
    Ok(IndexEntry {
        key: decode_key(r, key_len)?,
        link: Link::Disk(PageRef::decode(r)?),
    })
}
