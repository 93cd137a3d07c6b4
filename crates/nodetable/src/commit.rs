//! Commit: new nodes in, unreferenced nodes out, one checkpoint of the table.
//!
//! Reference counts change by differences. First every child entry of a new node counts +1, then
//! the root's reference moves, then nodes whose count falls to zero are reaped: their child entries
//! count -1, which may doom their children in turn, all from child lists in the table, without
//! reading a node. A new version of a node names mostly the children of the old one, so most
//! differences cancel and cost nothing. The other ones are written at the end, in the order of node
//! numbers.
//!
//! A node that may not go yet, because a reader holds it or because the budget of this commit is
//! spent, becomes a *zombie*: its record stays with refs 0, its children keep their references, and
//! every later commit tries again, oldest numbers first. Zombies are in the table, so a crash does
//! not forget them. A reader that holds a node therefore holds everything below it too.
//!
//! A commit that fails before its first page is written changes nothing: [`Undo`] has the state of
//! its beginning, whose pages are not changed in place. So a page that cannot be read costs this
//! commit only, and the next one tries again. If a write fails, or anything panics, the table takes
//! no more commits ([`Error::Poisoned`]). The state on disk, the last durable checkpoint, is
//! untouched in any case.

use std::collections::HashMap;

use ramet_block::Extent;
use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result};
use crate::page::Structure;
use crate::record::{Head, Meta, NewNode, NodeId, piece_key, record_key, zombie_key};
use crate::store::PageStore;
use crate::table::{NodeTable, TableRoots, Writer, has_carrier, read_head, read_record};
use crate::tree::Root;

/// Damaged pages that one commit renews. Each is read before, from a device that may be slow to fail.
const RENEWED_MAX: usize = 64;
/// Free space, in bytes, that a commit leaves for its own pages when it renews others.
const SPARED_BYTES: u64 = 512 << 10;

/// A commit that is written but not durable. Hand it to [`NodeTable::committed`] when it is.
#[derive(Debug)]
#[must_use = "without `committed` the space that it freed is never used again"]
pub struct Commit {
    /// The root pages that the superblock has to name.
    pub roots: TableRoots,
    /// Nodes that are gone; their numbers never come back.
    pub removed: Vec<NodeId>,
    /// Extents of nodes, and pages.
    freed: Vec<Extent>,
    freed_pages: Vec<Extent>,
}

impl NodeTable {
    /// Commits `new` nodes and a `root`, reclaims at most `reclaim_budget` nodes without
    /// references, and writes the changed pages. The caller syncs the device, writes a superblock
    /// that names [`Commit::roots`], syncs again, and calls [`NodeTable::committed`]. `get` answers
    /// from the new state as soon as this returns.
    ///
    /// Bytes of new nodes must be written before; children may come before or after their parents.
    /// `is_pinned` says whether a reader holds a node; a reader of a node holds all nodes below it.
    /// A new node that nothing references is reclaimed like any other.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::Poisoned`], [`Error::NoSpace`] when even the reserve is used
    /// up, [`Error::TooLong`] for a child list, [`Error::Corrupt`], also when a new node reuses a
    /// number or names a node that is not there, and [`Error::Io`]. The table is then as it was
    /// before. A failed write poisons it.
    pub fn commit(
        &self,
        new: Vec<NewNode>,
        root: Option<NodeId>,
        reclaim_budget: usize,
        is_pinned: &dyn Fn(NodeId) -> bool,
    ) -> Result<Commit> {
        let mut writer = self.writer.lock();
        self.space.gate.check()?;
        let panic = PoisonOnPanic(self);
        let undo = Undo::begin(&self.store, &writer);
        let mut change = Change {
            store: &self.store,
            delta: HashMap::new(),
            space: writer.grown.drain(..).map(|tail| (tail, 1)).collect(),
            writer: &mut writer,
            removed: Vec::new(),
            zombies: Vec::new(),
        };
        let changed = change.run(new, root, reclaim_budget, is_pinned);
        let (removed, zombies) = (change.removed, change.zombies);
        let committed = match changed {
            Ok(()) => self
                .write_pages(&mut writer, removed)
                .inspect_err(|_| self.poison()),
            Err(error) => {
                undo.take_back(&self.store, &mut writer, zombies);
                Err(error)
            }
        };
        std::mem::forget(panic);
        if committed.is_ok() {
            self.publish(&writer);
        }
        committed
    }

    /// Writes the changed pages of all trees.
    fn write_pages(&self, writer: &mut Writer, removed: Vec<NodeId>) -> Result<Commit> {
        let pages = self.store.freed_pages();
        let node_table = writer.tree.flush()?;
        let space_map = writer.free_map.flush()?;
        let freed = self.store.take_freed();
        if failpoints::is_on(Fault::DiscardedEarly) {
            self.store.discard(&freed);
        }
        let (freed_pages, freed) = freed.into_iter().partition(|extent| pages.contains(extent));
        let roots = TableRoots {
            node_table,
            space_map,
        };
        Ok(Commit {
            roots,
            removed,
            freed,
            freed_pages,
        })
    }

    /// Says that the superblock naming `commit.roots` is durable: the space that the commit freed
    /// is discarded and becomes allocatable. On a sparse device it stays backed, until
    /// [`crate::TableSpace::trim`]. Pages that a [`crate::TablePin`] may read wait for it.
    pub fn committed(&self, commit: Commit) {
        let (mut freed, pages) = (commit.freed, commit.freed_pages);
        freed.extend(self.store.pins.keep(pages, self.store.usable().len));
        self.store.give_back(freed);
    }
}

/// Dropped only while a panic passes through a commit, before the next one gets the writer.
struct PoisonOnPanic<'a>(&'a NodeTable);

impl Drop for PoisonOnPanic<'_> {
    fn drop(&mut self) {
        self.0.poison();
    }
}

/// The state of the writer when a commit began. Its pages are never changed in place: those of a
/// flushed tree are copied before they change.
struct Undo {
    tree: Root,
    free_map: Root,
    meta: Meta,
    grown: Vec<Extent>,
    /// Extents that were freed before.
    freed: usize,
}

impl Undo {
    fn begin(store: &PageStore, writer: &Writer) -> Self {
        Self {
            tree: writer.tree.root.clone(),
            free_map: writer.free_map.tree.root.clone(),
            meta: writer.meta,
            grown: writer.grown.clone(),
            freed: store.space.lock().freed_count(),
        }
    }

    /// Puts the state back. Pages that were allocated since are free again, and nothing is freed
    /// that was. `zombies` are the changes of the zombies in their order.
    fn take_back(self, store: &PageStore, writer: &mut Writer, zombies: Vec<(NodeId, bool)>) {
        writer.tree.root = self.tree;
        writer.free_map.tree.root = self.free_map;
        writer.meta = self.meta;
        for (id, is_zombie) in zombies.into_iter().rev() {
            if is_zombie {
                writer.zombies.remove(&id);
            } else {
                writer.zombies.insert(id);
            }
        }
        writer.grown = self.grown;
        store.space.lock().keep_freed(self.freed);
        store.undo_log();
    }
}

/// One commit in the making.
struct Change<'a> {
    store: &'a PageStore,
    writer: &'a mut Writer,
    /// References gained and lost, not yet in the records.
    delta: HashMap<NodeId, i64>,
    /// Extents of nodes that come (-1) and go (+1), and space that is new (+1), for the free-space
    /// map.
    space: Vec<(Extent, i8)>,
    removed: Vec<NodeId>,
    /// Nodes that became zombies, and nodes that are none any more.
    zombies: Vec<(NodeId, bool)>,
}

impl Change<'_> {
    /// Changes the pages of all trees in memory.
    fn run(
        &mut self,
        new: Vec<NewNode>,
        root: Option<NodeId>,
        reclaim_budget: usize,
        is_pinned: &dyn Fn(NodeId) -> bool,
    ) -> Result<()> {
        let meta_before = self.writer.meta;
        for node in &new {
            let lost = usize::from(failpoints::is_on(Fault::CountLost));
            for child in node.children.iter().rev().skip(lost) {
                *self.delta.entry(*child).or_default() += 1;
            }
        }
        let root = root.map_or(0, |root| root.0);
        let old_root = std::mem::replace(&mut self.writer.meta.root, root);
        if root != old_root && root != 0 {
            *self.delta.entry(NodeId(root)).or_default() += 1;
        }
        for node in &new {
            let refs = self.delta.remove(&node.id).unwrap_or(0);
            self.insert(node, refs.unsigned_abs())?;
        }
        for guest in new.iter().filter(|node| node.offset > 0) {
            self.check_guest(guest)?;
        }
        let mut doomed = Vec::new();
        if root != old_root && old_root != 0 {
            self.drop_reference(NodeId(old_root), &mut doomed)?;
        }
        self.reap(doomed, reclaim_budget, is_pinned)?;
        self.apply_deltas()?;
        self.renew_damaged();
        if self.writer.meta != meta_before {
            self.writer
                .tree
                .insert(&Meta::KEY, &self.writer.meta.encode())?;
        }
        self.writer.free_map.settle(std::mem::take(&mut self.space))
    }

    fn insert(&mut self, node: &NewNode, refs: u64) -> Result<()> {
        let wrong = |detail: String| Error::corrupt("new node", node.id.0, detail);
        let places = || [node.extent].into_iter().chain(node.extents());
        for extent in places() {
            extent
                .validate(self.store.usable())
                .map_err(|error| wrong(error.to_string()))?;
        }
        let end = u64::from(node.offset) + u64::from(node.used_bytes);
        if end > node.extent.len || node.id.0 == 0 || node.offset > 0 && node.copy.is_some() {
            return Err(wrong(format!(
                "{} bytes used at {} of {}",
                node.used_bytes, node.offset, node.extent
            )));
        }
        // Two owners of one place would be the worst of all: an extent that this table has not
        // given is refused.
        let free = {
            let space = self.store.space.lock();
            places().find(|extent| space.is_free_somewhere(*extent))
        };
        if let Some(extent) = free {
            return Err(wrong(format!("{extent} is not allocated")));
        }
        let tree = &mut self.writer.tree;
        if tree.lookup(&record_key(node.id))?.is_some() {
            return Err(wrong("the number is in use".into()));
        }
        let (head, pieces) = Head::of(node, refs)?;
        tree.insert(&record_key(node.id), &head.encode())?;
        for (piece, bytes) in (1..=u8::MAX).zip(&pieces) {
            tree.insert(&piece_key(node.id, piece), bytes)?;
        }
        *self.writer.meta.counter(node.kind) += 1;
        self.writer.meta.node_bytes += node.extents().map(|extent| extent.len).sum::<u64>();
        self.space.extend(node.extents().map(|extent| (extent, -1)));
        if refs == 0 {
            // To be reaped like those of earlier commits.
            self.set_zombie(node.id, true)?;
        }
        Ok(())
    }

    /// Checks that a node that a new guest names owns the extent, and ends before the guest.
    fn check_guest(&self, guest: &NewNode) -> Result<()> {
        let place = (guest.extent, guest.offset);
        if has_carrier(self.store, &self.writer.tree.root, &guest.children, place)? {
            return Ok(());
        }
        let extent = guest.extent;
        let detail = format!("N9: it lies in {extent}, which no child of it owns");
        Err(Error::corrupt("new node", guest.id.0, detail))
    }

    fn set_zombie(&mut self, id: NodeId, is_zombie: bool) -> Result<()> {
        if is_zombie && self.writer.zombies.insert(id) {
            self.zombies.push((id, true));
            self.writer.tree.insert(&zombie_key(id), &[])?;
        } else if !is_zombie && self.writer.zombies.remove(&id) {
            self.zombies.push((id, false));
            self.writer.tree.remove(&zombie_key(id))?;
        }
        Ok(())
    }

    /// Counts one reference less; pushes `id` to `doomed` when that was the last.
    fn drop_reference(&mut self, id: NodeId, doomed: &mut Vec<NodeId>) -> Result<()> {
        let delta = self.delta.entry(id).or_default();
        *delta -= 1;
        let delta = *delta;
        // Otherwise references gained in this commit outweigh those lost, and it lives.
        if delta < 0 && self.refs_after(id, delta)? == 0 {
            doomed.push(id);
        }
        Ok(())
    }

    fn refs_after(&self, id: NodeId, delta: i64) -> Result<u64> {
        let head = self.head(id)?;
        head.refs.checked_add_signed(delta).ok_or_else(|| {
            let detail = format!("N2: {} references, and {delta} more", head.refs);
            Error::corrupt("node record", id.0, detail)
        })
    }

    fn head(&self, id: NodeId) -> Result<Head> {
        let head = read_head(self.store, &self.writer.tree.root, id)?;
        head.ok_or_else(|| Error::corrupt("node record", id.0, "N3: named but not in the table"))
    }

    /// Removes doomed nodes and zombies while the budget lasts, and the nodes that they doom in
    /// turn. Depth first, so that few nodes are left over when the budget is spent.
    fn reap(
        &mut self,
        mut doomed: Vec<NodeId>,
        reclaim_budget: usize,
        is_pinned: &dyn Fn(NodeId) -> bool,
    ) -> Result<()> {
        // Oldest first: zombies come off the stack before the nodes that this commit dooms.
        let zombies = self.writer.zombies.iter().copied();
        let ripe = zombies.filter(|id| !is_pinned(*id)).take(reclaim_budget);
        let ripe: Vec<NodeId> = ripe.collect();
        doomed.extend(ripe.into_iter().rev());
        let mut budget = reclaim_budget;
        while let Some(id) = doomed.pop() {
            // A zombie may have been referenced anew by this commit.
            if self.delta.get(&id).is_some_and(|delta| *delta > 0) {
                continue;
            }
            if budget == 0 || is_pinned(id) && !failpoints::is_on(Fault::ZombieReclaimedEarly) {
                self.set_zombie(id, true)?;
                continue;
            }
            budget -= 1;
            for child in self.remove(id)? {
                self.drop_reference(child, &mut doomed)?;
            }
        }
        Ok(())
    }

    /// Takes the node out of the table and returns its children.
    fn remove(&mut self, id: NodeId) -> Result<Vec<NodeId>> {
        let head = self.head(id)?;
        let (kind, pieces) = (head.kind, head.pieces());
        let record = read_record(self.store, &self.writer.tree.root, id)?;
        let children = record
            .map(|record| record.children)
            .unwrap_or_else(Vec::new);
        self.writer.tree.remove(&record_key(id))?;
        for piece in 1..=pieces {
            self.writer.tree.remove(&piece_key(id, piece))?;
        }
        self.set_zombie(id, false)?;
        self.delta.remove(&id);
        let meta = &mut self.writer.meta;
        let counter = meta.counter(kind);
        *counter = counter.saturating_sub(1);
        for extent in head.extents() {
            meta.node_bytes = meta.node_bytes.saturating_sub(extent.len);
            if !failpoints::is_on(Fault::SpaceLeaked) {
                self.space.push((extent, 1));
            }
            self.store.space.lock().free_at_commit(extent);
        }
        self.removed.push(id);
        Ok(children)
    }

    /// Writes pages anew of which a read found one bad copy: a few in each commit, while the space
    /// lasts that the commit itself does not need. The others are kept for later commits.
    fn renew_damaged(&mut self) {
        let mut damaged = self.store.damaged.take().into_iter();
        for page in damaged.by_ref().take(RENEWED_MAX) {
            let space = self.store.space.lock();
            let is_short =
                space.backed_bytes() < (space.backed_reserve_bytes() / 2).max(SPARED_BYTES);
            drop(space);
            if is_short {
                self.store.damaged.keep(page);
                break;
            }
            let tree = match page.structure {
                Structure::NodeTable => &mut self.writer.tree,
                Structure::SpaceMap => &mut self.writer.free_map.tree,
            };
            match tree.renew(&page) {
                Ok(true) if !page.is_counted => self.store.damaged.count(),
                Ok(_) => {}
                // The other pages are as well off without this one.
                Err(_) => self.store.damaged.keep(page),
            }
        }
        damaged.for_each(|page| self.store.damaged.keep(page));
    }

    fn apply_deltas(&mut self) -> Result<()> {
        let mut deltas: Vec<_> = self
            .delta
            .drain()
            .filter(|(_, delta)| *delta != 0)
            .collect();
        deltas.sort_unstable();
        for (id, delta) in deltas {
            let mut head = self.head(id)?;
            head.refs = self.refs_after(id, delta)?;
            self.writer.tree.insert(&record_key(id), &head.encode())?;
            self.set_zombie(id, head.refs == 0)?;
        }
        Ok(())
    }
}
