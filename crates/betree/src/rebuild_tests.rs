//! Rebuilds of volumes on which old nodes lie in free space, or interior nodes cannot be read.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use ramet_block::superblock::read_superblock;
use ramet_block::{BLOCK_BYTES, Budget, Codec, Device, Extent, MemDevice, PageRef, checksum};
use ramet_nodetable::{NodeId, NodeKind, NodeRecord};

use crate::node::handle::{Kind, Place};
use crate::node::trailer::{TRAILER_BYTES, Trailer};
use crate::shape::{OpenOptions, TreeShape};
use crate::testing::{contents, records};
use crate::tree::api::Tree;
use crate::tree::batch::Batch;
use crate::tree::format::FormatOptions;
use crate::tree::found_nodes::FoundNodes;
use crate::tree::open::usable;
use crate::tree::overlaps::displaced;

const VOLUME_BYTES: u64 = 32 << 20;
const KEYS: u32 = 24_000;
/// The newest opening that the superblock of [`Shelf`] knows of.
const OPENINGS: u64 = 6;
const ID: NodeId = NodeId(7);

fn budget() -> Arc<Budget> {
    Budget::of_volumes(64 << 20)
}

/// An empty volume onto which nodes are laid, as openings leave them.
struct Shelf {
    dev: Arc<dyn Device>,
    seed: u64,
    usable: Extent,
    openings: u64,
}

impl Shelf {
    fn new() -> Self {
        let dev: Arc<dyn Device> = Arc::new(MemDevice::new(VOLUME_BYTES));
        Tree::format(&dev, &FormatOptions::default()).unwrap();
        let sb = read_superblock(&*dev).unwrap();
        Self {
            dev,
            seed: sb.node_seed,
            usable: usable(&sb),
            openings: OPENINGS,
        }
    }

    /// Lays a node of so many blocks, the first of which is `block` of the last MiB.
    fn lay(&self, id: NodeId, opening: u64, block: u64, blocks: u64) -> Place {
        let addr = self.usable.end() - (1 << 20) + block * BLOCK_BYTES;
        let bytes = [opening as u8; 100];
        let place = Place {
            extent: Extent::new(addr, blocks * BLOCK_BYTES),
            offset: 0,
            used_bytes: 100,
            checksum: checksum(&bytes),
        };
        let node = Trailer {
            id,
            opening,
            kind: Kind::Skeleton,
            height: 1,
            place,
        };
        self.dev.write_at(addr, &bytes).unwrap();
        let end = place.extent.end() - TRAILER_BYTES as u64;
        self.dev.write_at(end, &node.encode(self.seed)).unwrap();
        place
    }

    fn spoil(&self, place: Place) {
        self.dev.write_at(place.addr(), &[0xa5; 8]).unwrap();
    }

    fn search(&self) -> FoundNodes {
        let mut sb = read_superblock(&*self.dev).unwrap();
        sb.openings = self.openings;
        let mut found = FoundNodes::new(&sb, self.usable, &budget());
        found.search(&*self.dev, &mut |_, _| {}).unwrap();
        found
    }

    /// The opening of the entry of `ID`.
    fn found(&self) -> Option<u64> {
        let found = self.search();
        found.position(ID).map(|at| found.node(at).opening)
    }

    fn displaced(&self, journal: &[(NodeId, Extent)], root: Option<NodeId>) -> Vec<u64> {
        let found = self.search();
        let live: Vec<usize> = (0..found.count()).collect();
        let wrong = displaced(&*self.dev, &found, &live, journal, root);
        let wrong: BTreeSet<u64> = wrong.into_iter().map(|id| id.0).collect();
        wrong.into_iter().collect()
    }
}

/// Number 7 was given again after a crash. The node of the earlier opening is no part of any state.
#[test]
fn damaged_node_is_not_replaced_by_one_that_no_checkpoint_named() {
    let shelf = Shelf::new();
    shelf.lay(ID, 5, 0, 1);
    let right = shelf.lay(ID, OPENINGS, 4, 1);
    assert_eq!(shelf.found(), Some(OPENINGS));
    shelf.spoil(right);
    assert_eq!(shelf.found(), Some(OPENINGS));
}

#[test]
fn node_that_a_rebuild_left_over_counts_when_it_is_whole() {
    let shelf = Shelf::new();
    let torn = shelf.lay(ID, OPENINGS + 1, 4, 1);
    assert_eq!(shelf.found(), Some(OPENINGS + 1));
    shelf.spoil(torn);
    assert_eq!(shelf.found(), None, "it is torn");
    shelf.lay(ID, 5, 0, 1);
    assert_eq!(shelf.found(), Some(5));
}

/// A rebuild that was cut off had written a node for one that it could not read.
#[test]
fn left_over_of_a_rebuild_does_not_pass_for_a_newer_node_later() {
    let mut shelf = Shelf::new();
    let right = shelf.lay(ID, 5, 0, 1);
    let left_over = shelf.lay(ID, OPENINGS + 1, 4, 2);
    let used = shelf.lay(NodeId(8), OPENINGS + 1, 8, 1);
    shelf.spoil(left_over);
    let found = shelf.search();
    assert_eq!(shelf.found(), Some(5));
    let (free, end) = (right.extent.end(), used.extent.addr);
    let holes = [Extent::new(free, end - free)];
    found.erase_left_over(&*shelf.dev, &holes).unwrap();
    // A later rebuild has made the number of the opening known.
    shelf.openings = OPENINGS + 1;
    assert_eq!(shelf.found(), Some(5));
    assert!(shelf.search().position(NodeId(8)).is_some());
}

#[test]
fn of_nodes_of_one_opening_the_whole_one_is_found() {
    let shelf = Shelf::new();
    let first = shelf.lay(ID, OPENINGS, 0, 1);
    let second = shelf.lay(ID, OPENINGS, 4, 1);
    for (torn, whole) in [(first, second), (second, first)] {
        shelf.lay(ID, OPENINGS, 0, 1);
        shelf.lay(ID, OPENINGS, 4, 1);
        shelf.spoil(torn);
        let found = shelf.search();
        assert_eq!(found.node(found.position(ID).unwrap()).place, whole);
    }
}

/// Copies of a root of another opening are those of another root.
#[test]
fn copies_of_a_root_are_those_of_the_newest_opening() {
    let shelf = Shelf::new();
    shelf.lay(ID, 5, 0, 1);
    let first = shelf.lay(ID, OPENINGS, 4, 1);
    let mut block = vec![0; BLOCK_BYTES as usize];
    let read = |block: &mut Vec<u8>| shelf.dev.read_at(first.extent.addr, block).unwrap();
    read(&mut block);
    let second = first.extent.addr + 4 * BLOCK_BYTES;
    shelf.dev.write_at(second, &block).unwrap();
    let addrs = |found: FoundNodes| {
        let copies = found.copies_of(&*shelf.dev, ID).into_iter();
        copies.map(|copy| copy.place.addr()).collect::<Vec<_>>()
    };
    assert_eq!(addrs(shelf.search()), [first.addr(), second]);
    shelf.dev.write_at(first.addr(), &[0; 4096]).unwrap();
    assert_eq!(addrs(shelf.search()), [second]);
}

#[test]
fn of_two_nodes_in_one_place_the_better_one_stays() {
    let shelf = Shelf::new();
    // The later one is written over the end of the other.
    let id = |number| NodeId(number);
    let old = shelf.lay(id(10), 5, 0, 3);
    let new = shelf.lay(id(11), OPENINGS, 1, 1);
    let apart = shelf.lay(id(12), 2, 8, 1);
    assert_eq!(shelf.displaced(&[], None), [10]);
    shelf.spoil(new);
    assert_eq!(shelf.displaced(&[], None), [10], "it is damaged, and newer");
    shelf.lay(id(10), OPENINGS, 0, 3);
    shelf.lay(id(11), OPENINGS, 1, 1);
    shelf.spoil(old);
    assert_eq!(shelf.displaced(&[], None), [10], "it is not whole");
    assert_eq!(shelf.displaced(&[], Some(id(10))), [11], "the root");
    assert_eq!(shelf.displaced(&[(id(12), apart.extent)], None), [10]);
    assert_eq!(shelf.displaced(&[(id(13), apart.extent)], None), [10, 12]);
}

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn open(dev: &Arc<dyn Device>) -> Tree {
    let options = OpenOptions {
        manual: true,
        ..OpenOptions::default()
    };
    Tree::open(dev.clone(), options).unwrap()
}

/// A tree of some hundred leaves, whose records fill several pages.
fn wide() -> (Arc<dyn Device>, Tree, Model) {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(VOLUME_BYTES));
    let format = FormatOptions {
        shape: Some(TreeShape {
            leaf_bytes: 4 << 10,
            block_bytes: 1 << 10,
            fanout: 16,
            buffer_bytes: 16 << 10,
            memory_bytes: 64 << 10,
            ..TreeShape::default()
        }),
        codec: Some(Codec::Raw),
        ..FormatOptions::default()
    };
    Tree::format(&dev, &format).unwrap();
    let (tree, mut model) = (open(&dev), Model::new());
    for first in (0..KEYS).step_by(2000) {
        let mut batch = Batch::new();
        for n in first..first + 2000 {
            let (key, value) = (n.to_be_bytes().to_vec(), vec![n as u8; 100]);
            batch.put(key.clone(), value.clone());
            model.insert(key, value);
        }
        tree.apply(batch).unwrap();
        tree.checkpoint().unwrap();
    }
    (dev, tree, model)
}

fn rebuild(dev: &Arc<dyn Device>) -> crate::Rebuilt {
    crate::rebuild(dev, &budget(), &mut |_, _| {}).unwrap()
}

fn zero(dev: &Arc<dyn Device>, addr: u64) {
    dev.write_at(addr, &[0; BLOCK_BYTES as usize]).unwrap();
}

#[test]
fn stale_node_under_one_that_lives_costs_one_node_alone() {
    let (dev, tree, model) = wide();
    let all = records(&tree);
    let sb = tree.inner.checkpointer.superblock.lock().clone();
    let space = tree.inner.store.table.space();
    let is_leaf = |record: &&NodeRecord| record.kind == NodeKind::Leaf;
    let behind = |record: &NodeRecord| Extent::new(record.extent.end(), BLOCK_BYTES);
    let lives = all.values().filter(is_leaf);
    let lives = lives.into_iter().find(|record| space.pin(behind(record)));
    let lives = lives.expect("a leaf before free space");
    let mut leaves = all.iter().filter(|(_, record)| is_leaf(record));
    let lost = leaves.find(|(_, record)| record.extent != lives.extent);
    let (id, lost) = lost.unwrap();
    let extent = Extent::new(lives.extent.addr, lives.extent.len + BLOCK_BYTES);
    let stale = Trailer {
        id: *id,
        opening: 1,
        kind: Kind::Leaf,
        height: 0,
        place: Place {
            extent,
            offset: 0,
            used_bytes: 4000,
            checksum: 1,
        },
    };
    tree.close().unwrap();
    let newest = read_superblock(&*dev).unwrap().node_table;
    newest.copies().for_each(|addr| zero(&dev, addr));
    zero(&dev, lost.extent.end() - BLOCK_BYTES);
    let end = extent.end() - TRAILER_BYTES as u64;
    dev.write_at(end, &stale.encode(sb.node_seed)).unwrap();
    let rebuilt = rebuild(&dev);
    assert_eq!(rebuilt.lost.len(), 1, "{rebuilt:?}");
    let detail = &rebuilt.lost[0].detail;
    assert!(detail.contains("in the place of another"), "{detail}");
    let tree = open(&dev);
    let errors = model.iter().filter(|(key, value)| match tree.get(key) {
        Ok(found) => {
            assert_eq!(found.as_ref().map(|found| &found[..]), Some(&value[..]));
            false
        }
        Err(error) => {
            assert!(error.is_of_a_read(), "{error}");
            true
        }
    });
    let errors = errors.count();
    assert!(errors > 0 && errors < 200, "{errors}");
    let violations = tree.verify(&mut |_| {}).unwrap();
    let others = |violation: &&String| !violation.starts_with("T9");
    assert_eq!(violations.iter().find(others), None);
}

/// The pages below the root page of a table, and the nodes whose records each holds.
fn table_leaves(dev: &Arc<dyn Device>, root: PageRef) -> Vec<(PageRef, HashSet<NodeId>)> {
    let page = |at: &PageRef| {
        let mut bytes = vec![0; 8192];
        dev.read_at(at.addr, &mut bytes).unwrap();
        bytes
    };
    let u16_at = |bytes: &[u8], at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let u64_at =
        |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let index = page(&root);
    assert_eq!(index[5], 1, "the height");
    let mut at = 24;
    let mut leaves = Vec::new();
    for _ in 0..u16_at(&index, 6) {
        let link = at + 1 + usize::from(index[at]);
        let child = PageRef {
            addr: u64_at(&index, link),
            copy: u64_at(&index, link + 8),
            checksum: u64_at(&index, link + 16),
        };
        at = link + 24;
        let leaf = page(&child);
        let (mut from, mut ids) = (24, HashSet::new());
        for _ in 0..u16_at(&leaf, 6) {
            let key_at = from + 3;
            let value_at = key_at + usize::from(leaf[from]);
            if let [1, id @ ..] = &leaf[key_at..value_at]
                && let Ok(id) = <[u8; 8]>::try_from(id)
            {
                ids.insert(NodeId(u64::from_be_bytes(id)));
            }
            from = value_at + usize::from(u16_at(&leaf, from + 1));
        }
        leaves.push((child, ids));
    }
    leaves
}

/// The nodes below one.
fn below(all: &BTreeMap<NodeId, NodeRecord>, id: NodeId) -> BTreeSet<NodeId> {
    let mut found = BTreeSet::new();
    let mut todo = all[&id].children.clone();
    while let Some(id) = todo.pop() {
        if found.insert(id) {
            todo.extend(&all[&id].children);
        }
    }
    found
}

#[test]
fn nodes_below_a_node_that_cannot_be_read_stay() {
    let (dev, tree, model) = wide();
    tree.close().unwrap();
    let tree = open(&dev);
    let all = records(&tree);
    let root = tree.inner.store.table.root().unwrap();
    drop(tree);
    let pages = table_leaves(&dev, read_superblock(&*dev).unwrap().node_table);
    assert!(pages.len() > 1, "{pages:?}");
    let skeletons = all
        .iter()
        .filter(|(_, record)| record.kind == NodeKind::Skeleton);
    let inner = skeletons.filter(|(id, record)| **id != root && record.offset == 0);
    let mut choices = inner.flat_map(|(id, record)| {
        let (pages, below) = (&pages, below(&all, *id));
        pages.iter().filter_map(move |(page, ids)| {
            let is_apart = !ids.contains(id) && below.iter().any(|id| ids.contains(id));
            is_apart.then(|| (*page, record, below.clone()))
        })
    });
    let (page, record, below) = choices.next().expect("a node whose record is elsewhere");
    page.copies().for_each(|addr| zero(&dev, addr));
    let at = record.extent.addr + 40;
    let mut byte = [0];
    dev.read_at(at, &mut byte).unwrap();
    dev.write_at(at, &[byte[0] ^ 1]).unwrap();
    let rebuilt = rebuild(&dev);
    assert_eq!(rebuilt.lost.len(), 1, "{rebuilt:?}");
    dev.write_at(at, &byte).unwrap();
    let tree = open(&dev);
    let left = records(&tree);
    for id in below {
        let place = |records: &BTreeMap<NodeId, NodeRecord>| {
            records
                .get(&id)
                .map(|record| (record.extent, record.offset))
        };
        assert_eq!(place(&left), place(&all), "{id:?}");
    }
    assert_eq!(tree.verify(&mut |_| {}).unwrap(), Vec::<String>::new());
    assert!(contents(&tree) == model);
}
