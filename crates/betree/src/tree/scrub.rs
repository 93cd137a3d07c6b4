//! Scrubbing: every byte that the volume needs is read again from the device, while it is in use.
//!
//! Superblocks, the pages of the newest checkpoint and the journal behind it come first, all at
//! once. Only the superblocks hold checkpoints up: the pages are pinned, and a journal that a later
//! checkpoint has made needless is not judged. Then the written nodes below the root of that moment, one by
//! one: a handle pins the nodes below it, so flushes and checkpoints go on, and their later writes
//! are not read. Nothing is taken from the caches and nothing enters them.
//!
//! Damage with a copy is repaired: a superblock from the other copy or from memory, a page, the root
//! and a journal by a checkpoint, which writes pages and root anew and makes the journal needless. A
//! block of another node has no copy; it is reported with its keys, as seen from the first path that
//! led there.

use std::sync::Arc;

use bytes::Bytes;
use ramet_block::superblock::scrub_copies;
use ramet_block::{Call, Superblock};
use ramet_nodetable::{BadPage, TableRoots};

use crate::error::{Error, Result, if_readable, io_error};
use crate::id_set::IdSet;
use crate::journal::journal::Journal;
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::handle::{Handle, Kind, Place};
use crate::node::message::RangeMsg;
use crate::node::run_index::index_len;
use crate::node::skeleton::Skeleton;
use crate::tree::api::Tree;
use crate::tree::inner::Inner;

/// Damaged bytes of the device.
#[derive(Clone, Debug)]
pub struct Damage {
    /// Name of the structure.
    pub what: &'static str,
    /// Address of the structure, in bytes from the start of the device.
    pub addr: u64,
    /// Description of the damage.
    pub detail: String,
    /// First key, and end, of the keys that can no longer be read.
    pub keys: Option<(Bytes, Option<Bytes>)>,
    /// Whether the structure was written again.
    pub is_repaired: bool,
}

/// A scrub under way. It may be dropped at any time, which ends it.
pub struct Scrub {
    inner: Arc<Inner>,
    begun: bool,
    todo: Vec<Visit>,
    seen: IdSet,
    done_bytes: u64,
}

/// A node to be read, and the way to it.
struct Visit {
    node: Arc<Handle>,
    way: Way,
}

/// The way from the keys of the volume to a node.
pub(crate) struct Way {
    /// The keys of the volume that lead to the node; `None` if no path shows it.
    range: Option<KeyRange>,
    /// From those keys to the key space of the node.
    translation: Translation,
}

impl Tree {
    /// Begins to read all bytes again. Nothing is read before the first [`Scrub::step`].
    #[must_use]
    pub fn scrub(&self) -> Scrub {
        Scrub {
            inner: self.inner.clone(),
            begun: false,
            todo: Vec::new(),
            seen: IdSet::default(),
            done_bytes: 0,
        }
    }

    /// Reads all copies of metadata that is kept twice, and names those that are bad while the other
    /// one is good, a line each. The next checkpoints write them anew.
    ///
    /// # Errors
    /// None of a read: a record of the root node that is bad is told by [`Tree::verify`].
    pub fn bad_copies(&self) -> Result<Vec<String>> {
        let store = &self.inner.store;
        let sb = self.inner.checkpointer.superblock.lock();
        let (_, bad) = store.table.scrub(roots_of(&sb));
        let mendable = bad.into_iter().filter(|page| page.has_copy);
        let mut told: Vec<String> = mendable
            .map(|page| format!("N8 {}; the other copy is good", page.error))
            .collect();
        let root = self.inner.root.state.lock().root.clone();
        if root.is_recorded()
            && let Some([(addr, error)]) = if_readable(store.nodes.bad_copies(&root))?.as_deref()
        {
            told.push(format!(
                "T9 copy of the root node at byte {addr}: {error}; the other copy is good"
            ));
        }
        Ok(told)
    }
}

fn roots_of(sb: &Superblock) -> TableRoots {
    TableRoots {
        node_table: sb.node_table,
        space_map: sb.space_map,
    }
}

impl Scrub {
    /// Bytes read so far.
    #[must_use]
    pub fn done_bytes(&self) -> u64 {
        self.done_bytes
    }

    /// Bytes to be read in all, an estimate.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        let stats = self.inner.store.table.stats();
        stats.allocated.max(self.done_bytes)
    }

    /// Whether all bytes were read.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.begun && self.todo.is_empty()
    }

    /// Reads on, about `bytes`, and returns the damage found there.
    ///
    /// # Errors
    /// When a repair fails; the scrub can go on. Unreadable bytes are damage, not an error.
    pub fn step(&mut self, bytes: u64) -> Result<Vec<Damage>> {
        let mut found = Vec::new();
        if !self.begun {
            self.begun = true;
            self.scrub_checkpoint(&mut found)?;
            self.todo.push(Visit {
                node: self.inner.root.state.lock().root.clone(),
                way: Way::root(),
            });
        }
        let end = self.done_bytes.saturating_add(bytes);
        while self.done_bytes < end
            && let Some(visit) = self.todo.pop()
        {
            if self.seen.insert(visit.node.id())
                && let Err(error) = self.scrub_node(&visit, &mut found)
            {
                found.push(damage(error, visit.way.range()));
            }
        }
        Ok(found)
    }

    /// Superblocks, journal and pages.
    fn scrub_checkpoint(&mut self, found: &mut Vec<Damage>) -> Result<()> {
        let inner = self.inner.clone();
        let store = &inner.store;
        let newest = inner.checkpointer.superblock.lock();
        let sb = newest.clone();
        let is_fixed = inner.journal().is_none() || inner.failure.reason().is_some();
        let copies = scrub_copies(&*store.dev, &sb, is_fixed)
            .map_err(io_error(Call::Write, "a superblock"))?;
        found.extend(copies.into_iter().map(|copy| Damage {
            what: "superblock",
            addr: copy.addr,
            detail: copy.detail,
            keys: None,
            is_repaired: copy.is_repaired,
        }));
        let pin = store.table.pin();
        let durable = inner.journal().map_or(0, Journal::durable_frame);
        drop(newest);
        let (read_bytes, mut bad) = store.table.scrub(roots_of(&sb));
        if !pin.is_whole() {
            // Pages that a pin could not keep may have been written over.
            bad.clear();
        }
        drop(pin);
        self.done_bytes += read_bytes;
        let (copied, lost): (Vec<_>, Vec<_>) = bad.into_iter().partition(|page| page.has_copy);
        let told = |page: BadPage| damage(page.error.into(), None);
        found.extend(lost.into_iter().map(told));
        let mut mendable: Vec<Damage> = copied.into_iter().map(told).collect();
        if inner.journal().is_none() {
            found.extend(mendable);
            return Ok(());
        }
        let end = Journal::replay(
            &*store.dev,
            sb.journal,
            (crate::tree::open::uuid_low(&sb.uuid), sb.epoch),
            sb.journal_start,
            None,
            &mut |_, _| Ok(()),
        );
        let journal_addr = sb.journal.addr;
        // A later checkpoint has given the frames up before one is written over.
        let is_newest = inner.checkpointer.superblock.lock().generation == sb.generation;
        match end {
            Ok(end) if end.frame >= durable => {}
            _ if !is_newest => {}
            Ok(end) => mendable.push(Damage {
                what: "journal frame",
                addr: journal_addr,
                detail: format!("frame {} is unreadable, of {durable}", end.frame),
                keys: None,
                is_repaired: false,
            }),
            Err(error) => mendable.push(damage(error, None)),
        }
        if !mendable.is_empty() {
            // A checkpoint writes pages with one good copy anew. All records of the journal are in
            // memory as well.
            let is_repaired = inner.checkpointer.checkpoint().is_ok();
            let repaired = |damage| Damage {
                is_repaired,
                ..damage
            };
            found.extend(mendable.into_iter().map(repaired));
        }
        Ok(())
    }

    fn scrub_node(&mut self, visit: &Visit, found: &mut Vec<Damage>) -> Result<()> {
        let store = self.inner.store.clone();
        let node = &visit.node;
        if let Some(skeleton) = store.handles.dirty.skeleton(node) {
            self.visit_children(visit, &skeleton);
            return Ok(());
        }
        if let Some(run) = store.handles.dirty.run(node) {
            for (lo, entry) in run.ranges() {
                let range = KeyRange::new(lo.clone(), entry.hi.clone());
                self.visit_target(visit, &range, &entry.msg);
            }
            return Ok(());
        }
        if node.is_fresh() {
            // Packed points refer to no nodes.
            return Ok(());
        }
        let place = store.handles.place(node)?;
        if node.kind() == Kind::Skeleton && store.root_copies.second(node).is_some() {
            return self.scrub_root(visit, &place, found);
        }
        self.done_bytes += place.owned_bytes();
        let bytes = store.device.read(place.addr(), place.used_bytes as usize)?;
        if node.kind() == Kind::Skeleton {
            let skeleton = store.nodes.decode_skeleton(node, &place, &bytes)?;
            self.visit_children(visit, &skeleton);
            return Ok(());
        }
        // Without a sound length, no bytes have the checksum of the front part.
        let front = index_len(&bytes, place.used_bytes).unwrap_or(bytes.len());
        let index = store.nodes.decode_index(node, &place, &bytes[..front])?;
        for (range, msg) in &index.ranges {
            self.visit_target(visit, range, msg);
        }
        let bytes = Bytes::from(bytes);
        for (at, meta) in index.blocks.iter().enumerate() {
            let next = index.blocks.get(at + 1).map(|next| &next.first_key);
            let stored = bytes.slice(meta.offset as usize..meta.end() as usize);
            let addr = place.extent.addr + u64::from(meta.offset);
            if let Err(error) = meta.decode(node.kind(), stored, next, addr) {
                let keys = KeyRange::new(meta.first_key.clone(), next.cloned());
                let way = visit.way.below(&keys, &Translation::identity());
                found.push(damage(error, way.range()));
            }
        }
        Ok(())
    }

    /// Reads both copies of a root, and has a checkpoint write it anew if one is bad.
    fn scrub_root(&mut self, visit: &Visit, place: &Place, found: &mut Vec<Damage>) -> Result<()> {
        let store = self.inner.store.clone();
        self.done_bytes += 2 * place.extent.len;
        let bad = store.nodes.bad_copies(&visit.node)?;
        let is_repaired = bad.len() == 1
            && self.inner.journal().is_some()
            && self.inner.checkpointer.checkpoint().is_ok()
            && self.inner.root.state.lock().root.id() != visit.node.id();
        for (addr, error) in bad {
            found.push(Damage {
                addr,
                is_repaired,
                ..damage(error, visit.way.range().filter(|_| !is_repaired))
            });
        }
        let skeleton = store.nodes.skeleton(&visit.node)?;
        self.visit_children(visit, &skeleton);
        Ok(())
    }

    fn visit_children(&mut self, visit: &Visit, node: &Skeleton) {
        for (at, edge) in node.edges.iter().enumerate() {
            if let Some(child) = &edge.child {
                self.visit_below(visit, &node.edge_range(at), &child.translation, &child.node);
            }
        }
        for segment in &node.segs {
            self.visit_below(visit, &segment.clip, &segment.translation, &segment.run);
        }
    }

    fn visit_target(&mut self, visit: &Visit, range: &KeyRange, msg: &RangeMsg) {
        if let RangeMsg::Goto(target) = msg {
            self.visit_below(visit, range, &target.translation, &target.node);
        }
    }

    fn visit_below(
        &mut self,
        visit: &Visit,
        range: &KeyRange,
        translation: &Translation,
        node: &Arc<Handle>,
    ) {
        if !self.seen.contains(node.id()) {
            self.todo.push(Visit {
                node: node.clone(),
                way: visit.way.below(range, translation),
            });
        }
    }
}

impl Way {
    /// The way to the root.
    pub(crate) fn root() -> Self {
        Self {
            range: Some(KeyRange::all()),
            translation: Translation::identity(),
        }
    }

    /// A way that shows nothing.
    pub(crate) fn hidden() -> Self {
        Self {
            range: None,
            translation: Translation::identity(),
        }
    }

    /// The keys of the volume that lead to the node; `None` if no path shows it.
    pub(crate) fn range(&self) -> Option<&KeyRange> {
        self.range.as_ref()
    }

    /// The way on through the visible part of `range`, which is in this node's key space, and
    /// `translation`.
    pub(crate) fn below(&self, range: &KeyRange, translation: &Translation) -> Way {
        let seen = self.range.as_ref().and_then(|seen| {
            let part = self.translation.range(seen).intersect(range);
            (!part.is_empty()).then(|| self.translation.back(seen, &part))
        });
        let seen = seen.filter(|seen| !seen.is_empty());
        match seen {
            Some(seen) => Way {
                translation: self.translation.then(translation, &seen.lo),
                range: Some(seen),
            },
            None => Way::hidden(),
        }
    }
}

pub(crate) fn damage(error: Error, range: Option<&KeyRange>) -> Damage {
    let keys = range.map(|range| (range.lo.clone(), range.hi.clone()));
    let (what, addr, detail) = match error {
        Error::Corrupt { what, addr, detail } => (what, addr, detail),
        Error::Io(error) => (
            error.what,
            error.addr.unwrap_or(0),
            error.source.to_string(),
        ),
        other => ("node", 0, other.to_string()),
    };
    Damage {
        what,
        addr,
        detail,
        keys,
        is_repaired: false,
    }
}

#[cfg(test)]
mod tests {
    use ramet_block::{BLOCK_BYTES, Device, MemDevice, MetadataCopies};
    use ramet_nodetable::NodeId;

    use super::*;
    use crate::shape::OpenOptions;
    use crate::shape::TreeShape;
    use crate::tree::batch::Batch;
    use crate::tree::format::FormatOptions;

    fn tree(dev: &Arc<dyn Device>, metadata_copies: MetadataCopies) -> Tree {
        let shape = TreeShape {
            leaf_bytes: 4096,
            block_bytes: 1024,
            fanout: 4,
            buffer_bytes: 8 << 10,
            memory_bytes: 8 << 10,
            ..TreeShape::default()
        };
        let format = FormatOptions {
            shape: Some(shape.clone()),
            metadata_copies,
            ..FormatOptions::default()
        };
        Tree::format(dev, &format).unwrap();
        let open = OpenOptions {
            shape: Some(shape),
            manual: true,
            ..OpenOptions::default()
        };
        let tree = Tree::open(dev.clone(), open).unwrap();
        for part in 0..40 {
            let mut batch = Batch::new();
            for n in 0..50 {
                batch.put(format!("src/{:05}", part * 50 + n), vec![7; 40]);
            }
            tree.apply(batch).unwrap();
        }
        let mut batch = Batch::new();
        batch.clone_prefix("src/", "copy/");
        tree.apply(batch).unwrap();
        tree.checkpoint().unwrap();
        tree
    }

    fn scrub(tree: &Tree) -> Vec<Damage> {
        let mut scrub = tree.scrub();
        let mut found = Vec::new();
        while !scrub.is_done() {
            found.extend(scrub.step(20_000).unwrap());
        }
        assert!(scrub.done_bytes() > 0 && scrub.total_bytes() >= scrub.done_bytes());
        found
    }

    fn flip(dev: &Arc<dyn Device>, addr: u64) {
        let mut byte = [0];
        dev.read_at(addr, &mut byte).unwrap();
        dev.write_at(addr, &[byte[0] ^ 4]).unwrap();
    }

    #[test]
    fn a_flipped_bit_in_any_node_is_found_with_its_keys_though_all_is_cached() {
        let dev: Arc<dyn Device> = Arc::new(MemDevice::new(8 << 20));
        let tree = tree(&dev, MetadataCopies::One);
        assert_eq!(tree.scan(b"", None).count(), 4000);
        assert!(scrub(&tree).is_empty());
        let mut nodes = Vec::new();
        let table = &tree.inner.store.table;
        table
            .for_each(&mut |_, record| {
                let addr = record.extent.addr + u64::from(record.offset);
                nodes.push((addr, u64::from(record.used_bytes)));
            })
            .unwrap();
        assert!(nodes.len() > 20);
        for (first, used) in nodes {
            for addr in [first + 5, first + used - 1] {
                flip(&dev, addr);
                let found = scrub(&tree);
                flip(&dev, addr);
                let [one] = &found[..] else {
                    panic!("{addr}: {found:?}")
                };
                assert!(!one.is_repaired && first <= one.addr && one.addr <= addr);
                let (lo, hi) = one.keys.clone().unwrap();
                assert!(hi.is_none_or(|hi| lo < hi), "{found:?}");
            }
        }
    }

    #[test]
    fn superblocks_and_the_journal_are_repaired() {
        let dev: Arc<dyn Device> = Arc::new(MemDevice::new(8 << 20));
        let tree = tree(&dev, MetadataCopies::Two);
        let mut batch = Batch::new();
        batch.put("late", "1");
        tree.apply(batch).unwrap();
        tree.sync().unwrap();
        for addr in [0, 32 << 10, 64 << 10, 96 << 10] {
            flip(&dev, addr + 20);
            let found = scrub(&tree);
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(found[0].is_repaired && found[0].addr == addr, "{found:?}");
            assert!(scrub(&tree).is_empty());
        }
        // Both copies of the older superblock.
        let newest = tree.inner.checkpointer.superblock.lock().clone();
        let older = [[64 << 10, 32 << 10], [0, 96 << 10]][newest.slot()];
        older.iter().for_each(|addr| flip(&dev, addr + 20));
        let found = scrub(&tree);
        assert!(found.len() == 2 && found.iter().all(|damage| damage.is_repaired));
        assert!(scrub(&tree).is_empty());

        let start = newest.journal.addr + newest.journal_start.offset % newest.journal.len;
        flip(&dev, start + 80);
        let found = scrub(&tree);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].is_repaired && found[0].what == "journal frame");
        assert!(scrub(&tree).is_empty());
        drop(tree);
        let tree = Tree::open(dev.clone(), OpenOptions::default()).unwrap();
        assert_eq!(tree.get(b"late").unwrap().as_deref(), Some(&b"1"[..]));
        assert!(dev.len_bytes().is_multiple_of(BLOCK_BYTES));
    }

    #[test]
    fn pages_and_the_root_are_repaired_from_their_other_copy() {
        let dev: Arc<dyn Device> = Arc::new(MemDevice::new(8 << 20));
        let tree = tree(&dev, MetadataCopies::Two);
        for copy in 0..2 {
            for structure in 0..3 {
                let sb = tree.inner.checkpointer.superblock.lock().clone();
                let root = tree.inner.store.table.get(NodeId(sb.root_node));
                let root = root.unwrap().unwrap();
                let copies = [
                    [sb.node_table.addr, sb.node_table.copy],
                    [sb.space_map.addr, sb.space_map.copy],
                    [root.extent.addr, root.copy.unwrap()],
                ];
                let addr = copies[structure][copy];
                flip(&dev, addr + 20);
                let found = scrub(&tree);
                assert!(found.len() == 1 && found[0].is_repaired, "{found:?}");
                assert_eq!(found[0].addr, addr);
                assert!(scrub(&tree).is_empty());
            }
        }
        assert_eq!(tree.verify(&mut |_| {}).unwrap(), Vec::<String>::new());
    }
}
