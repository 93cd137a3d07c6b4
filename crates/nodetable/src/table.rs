//! The node table: from node number to place, checksum, count and children.
//!
//! One commit at a time writes (`commit.rs`), under the writer lock. Readers take the published
//! root (one short read lock) and walk pages without locks. A reader may be overtaken: the commit
//! after its snapshot becomes durable, pages of the snapshot are reused, and a checksum fails. The
//! reader then sees that another root has been published meanwhile and starts again from that one.
//! Only a failure under an unchanged root is corruption.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use ramet_block::{BLOCK_BYTES, Device, Extent, MetadataCopies, PageRef};

use crate::error::{Error, Result};
use crate::free_map::FreeMap;
use crate::record::{
    Head, KeyKind, Meta, NodeId, NodeRecord, SHAPE, parse_key, piece_key, record_key, zombie_key,
};
use crate::sharing::Unshared;
use crate::store::{CACHE_PAGES, PAGE_MEMORY_BYTES, PageStore};
use crate::table_space::TableSpace;
use crate::tree::{Root, ShadowTree, lookup};

/// Memory of the clean pages that a table keeps, at least and at most, in bytes.
const CACHED_BYTES_MIN: u64 = 64 * PAGE_MEMORY_BYTES;
const CACHED_BYTES_MAX: u64 = CACHE_PAGES * PAGE_MEMORY_BYTES;

/// A reader overtaken this often in a row gives up; each time needs a whole checkpoint in between.
const OVERTAKEN_MAX: u32 = 64;

/// The root pages that a superblock has to name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TableRoots {
    /// Root page of the node table; none while there is no node.
    pub node_table: PageRef,
    /// Root page of the free-space map.
    pub space_map: PageRef,
}

/// Sizes are bytes. `total` = `allocated` + `free` + `pending_free`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpaceStats {
    /// The area that nodes and pages share.
    pub total: u64,
    /// Allocatable now, the reserve included.
    pub free: u64,
    /// Freed by a checkpoint that is not durable yet.
    pub pending_free: u64,
    /// Part of `free` that only checkpoints may use.
    pub reserved: u64,
    /// Part of `free` that can be written without more room of the host: all of it, unless the
    /// device is sparse.
    pub backed: u64,
    /// Part of `backed` that only checkpoints may use.
    pub backed_reserved: u64,
    /// Bytes that the host of a sparse device still gives, as far as is known; `None` for other
    /// devices.
    pub host_free: Option<u64>,
    /// In use by nodes, pages, and allocations that no checkpoint names yet.
    pub allocated: u64,
    /// Bytes of the extents of the nodes in the table.
    pub node_bytes: u64,
    /// Nodes in the table, zombies included.
    pub nodes: u64,
    /// Of these, leaves.
    pub leaves: u64,
    /// Of these, segments.
    pub segments: u64,
    /// Of these, skeletons.
    pub skeletons: u64,
    /// Nodes without references that wait to be reclaimed.
    pub zombies: u64,
}

/// The node table of one volume.
pub struct NodeTable {
    pub(crate) store: Arc<PageStore>,
    pub(crate) space: TableSpace,
    pub(crate) writer: Mutex<Writer>,
    published: RwLock<Published>,
}

/// The state that only commits touch.
pub(crate) struct Writer {
    pub tree: ShadowTree,
    pub free_map: FreeMap,
    pub meta: Meta,
    /// Nodes with refs 0, as in the tree.
    pub zombies: BTreeSet<NodeId>,
    /// Space that the map does not know yet.
    pub grown: Vec<Extent>,
}

impl Writer {
    /// Without nodes, or of a table about to be opened.
    pub(crate) fn new(tree: ShadowTree, free_map: FreeMap) -> Self {
        Self {
            tree,
            free_map,
            meta: Meta::default(),
            zombies: BTreeSet::new(),
            grown: Vec::new(),
        }
    }
}

struct Published {
    root: Root,
    meta: Meta,
    zombies: u64,
    /// Counts publications.
    version: u64,
}

impl NodeTable {
    /// Writes an empty table over `usable`, the area behind superblocks and journal. Not durable
    /// before the device is synced and a superblock names the roots.
    ///
    /// # Errors
    /// [`Error::NoSpace`] when `usable` cannot hold even that, [`Error::Io`], or [`Error::Corrupt`]
    /// when `usable` is unaligned or outside of the device.
    pub fn format(
        device: &Arc<dyn Device>,
        usable: Extent,
        copies: MetadataCopies,
    ) -> Result<TableRoots> {
        let store = PageStore::open(device, usable, copies, Unshared)?;
        let mut free_map = FreeMap::format(&store)?;
        Ok(TableRoots {
            node_table: PageRef::NONE,
            space_map: free_map.flush()?,
        })
    }

    /// Opens the table of a checkpoint. Reads the free-space map and the zombies; everything else is read when it is asked for.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Corrupt`].
    pub fn open(
        device: &Arc<dyn Device>,
        roots: TableRoots,
        usable: Extent,
        copies: MetadataCopies,
        read_only: bool,
    ) -> Result<Self> {
        let store = PageStore::open(device, usable, copies, Unshared)?;
        let newest = match roots.node_table {
            PageRef::NONE => roots.space_map,
            root => root,
        };
        store.expect_around(newest.addr);
        let free_map = FreeMap::load(&store, roots.space_map)?;
        store.space.lock().resume(newest.addr);
        let tree = ShadowTree::open(store.clone(), SHAPE, roots.node_table);
        let meta = match tree.lookup(&Meta::KEY)? {
            Some(bytes) => Meta::decode(&bytes)?,
            None => Meta::default(),
        };
        let mut zombies = BTreeSet::new();
        for entry in tree.range(&zombie_key(NodeId(0))) {
            match parse_key(&entry?.0)? {
                KeyKind::Zombie(id) => drop(zombies.insert(id)),
                KeyKind::Meta => {}
                other => {
                    let detail = format!("{other:?} among the zombies");
                    return Err(Error::corrupt("node table", 0, detail));
                }
            }
        }
        let writer = Writer {
            meta,
            zombies,
            ..Writer::new(tree, free_map)
        };
        Ok(Self {
            space: TableSpace::new(Arc::clone(&store), read_only),
            ..Self::with(store, writer)
        })
    }

    /// A table that commits may change.
    pub(crate) fn with(store: Arc<PageStore>, writer: Writer) -> Self {
        let published = Published {
            root: writer.tree.root.clone(),
            meta: writer.meta,
            zombies: writer.zombies.len() as u64,
            version: 0,
        };
        Self {
            space: TableSpace::new(Arc::clone(&store), false),
            store,
            writer: Mutex::new(writer),
            published: RwLock::new(published),
        }
    }

    /// The record of a node as of the last finished commit. Waits for no commit and no allocation.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Corrupt`].
    pub fn get(&self, id: NodeId) -> Result<Option<NodeRecord>> {
        let mut overtaken = 0;
        loop {
            let (root, version) = {
                let published = self.published.read();
                (published.root.clone(), published.version)
            };
            match read_record(&self.store, &root, id) {
                Err(Error::Corrupt { .. })
                    if overtaken < OVERTAKEN_MAX && self.published.read().version != version =>
                {
                    overtaken += 1;
                }
                other => return other,
            }
        }
    }

    /// The root node of the last finished commit.
    pub fn root(&self) -> Option<NodeId> {
        let root = self.published.read().meta.root;
        (root != 0).then_some(NodeId(root))
    }

    /// The space of nodes and pages.
    #[must_use]
    pub fn space(&self) -> &TableSpace {
        &self.space
    }

    /// Makes the usable area end at `end`. The next commit names the new part as free. It can be
    /// allocated when that commit is durable, together with a superblock that knows the size.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when `end` is unaligned or not behind where the area ended, or the table
    /// is read-only or poisoned.
    pub fn grow(&self, end: u64) -> Result<()> {
        let mut writer = self.writer.lock();
        self.space.gate.check()?;
        let old = self.store.usable();
        if end <= old.end() || !end.is_multiple_of(BLOCK_BYTES) {
            let detail = format!("it ends at {}, and cannot at {end}", old.end());
            return Err(Error::corrupt("usable area", old.addr, detail));
        }
        let tail = self.store.space.lock().grow(end);
        self.store.grow_to(end);
        writer.grown.push(tail);
        Ok(())
    }

    /// Size of the usable area, in bytes.
    #[must_use]
    pub fn usable_bytes(&self) -> u64 {
        self.store.usable().len
    }

    /// Keeps clean pages of `bytes` in memory, about, within bounds.
    pub fn limit_cached_pages(&self, bytes: u64) {
        let bytes = bytes.clamp(CACHED_BYTES_MIN, CACHED_BYTES_MAX);
        self.store.limit_cache(bytes);
    }

    /// Memory of the clean pages, about, in bytes.
    #[must_use]
    pub fn cached_page_bytes(&self) -> u64 {
        self.store.cached_bytes()
    }

    /// Whether a page with a bad copy was noted since the last commit.
    #[must_use]
    pub fn has_damaged(&self) -> bool {
        self.store.damaged.has_news()
    }

    /// Pages of which one copy was bad and the other good, since the table was opened: those that a
    /// scrub found, and those that reads found and commits wrote anew, elsewhere.
    #[must_use]
    pub fn damaged_found(&self) -> u64 {
        self.store.damaged.found()
    }

    /// How often a page is kept.
    #[must_use]
    pub fn copies(&self) -> MetadataCopies {
        self.store.copies()
    }

    /// Counters, in constant time.
    pub fn stats(&self) -> SpaceStats {
        let (meta, zombies) = {
            let published = self.published.read();
            (published.meta, published.zombies)
        };
        let space = self.store.space.lock();
        let (free, pending) = (space.free_bytes(), space.pending_bytes());
        let total = self.store.usable().len;
        SpaceStats {
            total,
            free,
            pending_free: pending,
            reserved: space.reserve_bytes().min(free),
            backed: space.backed_bytes(),
            backed_reserved: space.backed_reserve_bytes().min(space.backed_bytes()),
            host_free: self
                .store
                .space
                .is_sparse()
                .then(|| self.store.space.host_free_bytes()),
            allocated: total.saturating_sub(free).saturating_sub(pending),
            node_bytes: meta.node_bytes,
            nodes: meta.leaves + meta.segments + meta.skeletons,
            leaves: meta.leaves,
            segments: meta.segments,
            skeletons: meta.skeletons,
            zombies,
        }
    }

    /// Visits every record of the last commit in the order of numbers. Commits wait meanwhile.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Corrupt`]; records before the fault have been visited.
    pub fn for_each(&self, visit: &mut dyn FnMut(NodeId, &NodeRecord)) -> Result<()> {
        let writer = self.writer.lock();
        for entry in writer.tree.range(&record_key(NodeId(0))) {
            let (key, value) = entry?;
            match parse_key(&key)? {
                KeyKind::Record(id) => {
                    let head = Head::decode(id, &value, self.store.usable())?;
                    visit(id, &with_pieces(&self.store, &writer.tree.root, id, head)?);
                }
                KeyKind::Piece(..) => {}
                KeyKind::Meta | KeyKind::Zombie(_) => break,
            }
        }
        Ok(())
    }

    /// Refuses allocations and commits from now on. For a caller that cannot tell whether a commit
    /// became durable: space that the commit before it had freed, or that was never published, may
    /// then be named by the superblock on the device, and must not be written again.
    pub fn poison(&self) {
        self.space.gate.poison();
    }

    /// The root page of the last finished commit.
    pub(crate) fn published_root(&self) -> Root {
        self.published.read().root.clone()
    }

    pub(crate) fn publish(&self, writer: &Writer) {
        let mut published = self.published.write();
        published.root = writer.tree.root.clone();
        published.meta = writer.meta;
        published.zombies = writer.zombies.len() as u64;
        published.version += 1;
    }
}

/// The fixed part of the record of `id` in the snapshot `root`.
pub(crate) fn read_head(store: &PageStore, root: &Root, id: NodeId) -> Result<Option<Head>> {
    match lookup(store, &SHAPE, root, &record_key(id))? {
        Some(bytes) => Head::decode(id, &bytes, store.usable()).map(Some),
        None => Ok(None),
    }
}

/// Whether one of `children` owns the extent of a guest that names them, and ends before it.
pub(crate) fn has_carrier(
    store: &PageStore,
    root: &Root,
    children: &[NodeId],
    (extent, offset): (Extent, u32),
) -> Result<bool> {
    // Segments come last in the list of children.
    for child in children.iter().rev() {
        let head = read_head(store, root, *child)?;
        if head.is_some_and(|head| head.carries(extent, offset)) {
            return Ok(true);
        }
    }
    Ok(false)
}

pub(crate) fn read_record(
    store: &PageStore,
    root: &Root,
    id: NodeId,
) -> Result<Option<NodeRecord>> {
    match read_head(store, root, id)? {
        Some(head) => with_pieces(store, root, id, head).map(Some),
        None => Ok(None),
    }
}

fn with_pieces(store: &PageStore, root: &Root, id: NodeId, head: Head) -> Result<NodeRecord> {
    let mut pieces = Vec::new();
    for piece in 1..=head.pieces() {
        let found = lookup(store, &SHAPE, root, &piece_key(id, piece))?;
        let missing = || Error::corrupt("node record", id.0, format!("piece {piece} is missing"));
        pieces.push(found.ok_or_else(missing)?);
    }
    head.into_record(id, &pieces)
}
