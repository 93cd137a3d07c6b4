//! The node table against a model: a set of nodes with child lists. A commit keeps the nodes that
//! the root or a pin reaches. `RAMET_SEED` and `RAMET_STEPS` replay or lengthen a run.

#![expect(
    clippy::unwrap_used,
    reason = "a failed step of a test is a failed test"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ramet_block::{Call, Device, Extent, MemDevice, MetadataCopies};
use ramet_nodetable::{
    Commit, Error, NewNode, NodeId, NodeKind, NodeRecord, NodeTable, TableRoots,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const USABLE: Extent = Extent::new(1 << 20, 127 << 20);

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

fn memory() -> Arc<dyn Device> {
    Arc::new(MemDevice::new(USABLE.end()))
}

fn fresh(device: &Arc<dyn Device>) -> (NodeTable, TableRoots) {
    let roots = NodeTable::format(device, USABLE, MetadataCopies::Two).unwrap();
    (
        NodeTable::open(device, roots, USABLE, MetadataCopies::Two, false).unwrap(),
        roots,
    )
}

fn node(table: &NodeTable, id: u64, len: u64, children: &[u64]) -> NewNode {
    NewNode {
        id: NodeId(id),
        extent: table.space().alloc(len).unwrap(),
        offset: 0,
        copy: None,
        used_bytes: len as u32,
        checksum: id * 7,
        kind: [NodeKind::Leaf, NodeKind::Segment, NodeKind::Skeleton][(id % 3) as usize],
        height: u32::from(!children.is_empty()),
        children: children.iter().copied().map(NodeId).collect(),
    }
}

fn commit(table: &NodeTable, new: Vec<NewNode>, root: u64) -> Commit {
    let root = (root != 0).then_some(NodeId(root));
    table.commit(new, root, usize::MAX, &|_| false).unwrap()
}

fn records(table: &NodeTable) -> BTreeMap<NodeId, NodeRecord> {
    let mut all = BTreeMap::new();
    table
        .for_each(&mut |id, record| drop(all.insert(id, record.clone())))
        .unwrap();
    all
}

fn check(table: &NodeTable) {
    assert_eq!(table.check(&mut |_| {}).unwrap(), []);
    let stats = table.stats();
    assert_eq!(
        stats.total,
        stats.free + stats.pending_free + stats.allocated
    );
}

#[derive(Default)]
struct Model {
    nodes: BTreeMap<u64, Vec<u64>>,
    root: u64,
    pins: BTreeSet<u64>,
    next: u64,
}

impl Model {
    fn reachable(&self) -> BTreeSet<u64> {
        let mut found = BTreeSet::new();
        let mut stack: Vec<u64> = self.pins.iter().copied().collect();
        stack.extend((self.root != 0).then_some(self.root));
        while let Some(id) = stack.pop() {
            if found.insert(id) {
                stack.extend(&self.nodes[&id]);
            }
        }
        found
    }

    /// New nodes over the nodes that the root reaches now; the last one is to be the next root.
    fn grow(&mut self, rng: &mut StdRng) -> Vec<u64> {
        let root_only = Self {
            pins: BTreeSet::new(),
            nodes: self.nodes.clone(),
            ..*self
        };
        let mut base: Vec<u64> = root_only.reachable().into_iter().collect();
        let mut new = Vec::new();
        let count = rng.random_range(1..12);
        for n in 0..count {
            self.next += 1;
            // Now and then a child list that needs several entries of the table.
            let most = match n + 1 == count {
                _ if rng.random_bool(0.02) => 4000,
                true => 200,
                false => 12,
            };
            let count = if base.is_empty() {
                0
            } else {
                rng.random_range(0..most)
            };
            let children = (0..count).map(|_| base[rng.random_range(0..base.len())]);
            self.nodes.insert(self.next, children.collect());
            base.push(self.next);
            new.push(self.next);
        }
        new
    }
}

#[test]
fn a_commit_keeps_the_nodes_that_root_and_pins_reach() {
    let seed = number("RAMET_SEED", 1);
    println!("RAMET_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let device = memory();
    let (mut table, mut roots) = fresh(&device);
    let mut model = Model::default();
    let mut most = 0;
    for step in 0..number("RAMET_STEPS", 600) {
        most = most.max(model.nodes.len());
        let ids = model.grow(&mut rng);
        let len = |rng: &mut StdRng| [4096, 10_000, 65_536][rng.random_range(0..3)];
        let mut new: Vec<NewNode> = ids
            .iter()
            .map(|id| node(&table, *id, len(&mut rng), &model.nodes[id]))
            .collect();
        if rng.random_bool(0.5) {
            new.reverse();
        }
        match rng.random_range(0..20) {
            0 if rng.random_bool(0.2) => model.root = 0,
            0..4 => {}
            _ => model.root = model.next,
        }
        model.pins.retain(|_| rng.random_bool(0.8));
        if rng.random_bool(0.4) {
            let candidates: Vec<u64> = model.reachable().into_iter().collect();
            if !candidates.is_empty() {
                model
                    .pins
                    .insert(candidates[rng.random_range(0..candidates.len())]);
            }
        }
        let root = (model.root != 0).then_some(NodeId(model.root));
        let paced = rng.random_bool(0.3);
        let pins = model.pins.clone();
        let is_pinned = |id: NodeId| pins.contains(&id.0);
        let budget = if paced {
            rng.random_range(0..5)
        } else {
            usize::MAX
        };
        let before = table.stats().nodes + new.len() as u64;
        let commit = table.commit(new, root, budget, &is_pinned).unwrap();
        assert!(commit.removed.len() <= budget);
        assert_eq!(table.stats().nodes, before - commit.removed.len() as u64);
        // The checkpoint before is still whole, for any part of the writes that reached the device.
        if step % 10 == 0 {
            check(&NodeTable::open(&device, roots, USABLE, MetadataCopies::Two, true).unwrap());
        }
        roots = commit.roots;
        table.committed(commit);
        check(&table);
        let keep = model.reachable();
        let found = records(&table);
        if paced {
            assert!(keep.iter().all(|id| found.contains_key(&NodeId(*id))));
        } else {
            assert_eq!(found.keys().map(|id| id.0).collect::<BTreeSet<_>>(), keep);
        }
        model.nodes.retain(|id, _| found.contains_key(&NodeId(*id)));
        for (id, record) in &found {
            let children: Vec<u64> = record.children.iter().map(|child| child.0).collect();
            assert_eq!(
                (record.checksum, &children),
                (id.0 * 7, &model.nodes[&id.0])
            );
        }
        if rng.random_bool(0.2) {
            drop(table);
            table = NodeTable::open(&device, roots, USABLE, MetadataCopies::Two, false).unwrap();
            // Pins do not outlive the process; the next commit finds the zombies again.
            model.pins.clear();
            check(&table);
        }
    }
    println!("{most} nodes at most");
    let last = commit(&table, vec![], 0);
    table.committed(last);
    check(&table);
    let stats = table.stats();
    assert_eq!((stats.nodes, stats.zombies, stats.node_bytes), (0, 0, 0));
    assert!(
        stats.allocated <= 3 * 8192,
        "{stats:?}: only the counters and the map are left"
    );
}

#[test]
fn a_pinned_node_keeps_everything_below_until_it_is_let_go() {
    let device = memory();
    let (table, _) = fresh(&device);
    let new = vec![
        node(&table, 1, 4096, &[]),
        node(&table, 2, 4096, &[1]),
        node(&table, 3, 4096, &[2]),
    ];
    let first = commit(&table, new, 3);
    table.committed(first);
    let pinned = table
        .commit(vec![], None, usize::MAX, &|id| id == NodeId(2))
        .unwrap();
    assert_eq!(pinned.removed, [NodeId(3)]);
    table.committed(pinned);
    assert_eq!(table.get(NodeId(2)).unwrap().unwrap().refs, 0);
    assert_eq!(table.get(NodeId(1)).unwrap().unwrap().refs, 1);
    assert_eq!(table.stats().zombies, 1);
    check(&table);
    let released = commit(&table, vec![], 0);
    assert_eq!(released.removed, [NodeId(2), NodeId(1)]);
    table.committed(released);
    check(&table);
}

#[test]
fn a_zombie_that_is_named_again_lives() {
    let device = memory();
    let (table, _) = fresh(&device);
    let first = commit(&table, vec![node(&table, 1, 4096, &[])], 1);
    table.committed(first);
    let dropped = table.commit(vec![], None, usize::MAX, &|_| true).unwrap();
    table.committed(dropped);
    assert_eq!(table.stats().zombies, 1);
    let again = commit(&table, vec![node(&table, 2, 4096, &[1, 1])], 2);
    assert_eq!(again.removed, []);
    table.committed(again);
    assert_eq!(table.get(NodeId(1)).unwrap().unwrap().refs, 2);
    assert_eq!(table.stats().zombies, 0);
    check(&table);
}

#[test]
fn the_budget_paces_and_zombies_survive_reopening() {
    let device = memory();
    let (table, _) = fresh(&device);
    let mut new: Vec<_> = (1..=500).map(|id| node(&table, id, 4096, &[])).collect();
    new.push(node(&table, 501, 4096, &(1..=500).collect::<Vec<_>>()));
    let first = commit(&table, new, 501);
    table.committed(first);
    let mut roots = TableRoots::default();
    let mut table = table;
    let mut gone = 0;
    for round in 0..8 {
        let part = table.commit(vec![], None, 100, &|_| false).unwrap();
        gone += part.removed.len();
        roots = part.roots;
        table.committed(part);
        check(&table);
        if round % 2 == 0 {
            table = NodeTable::open(&device, roots, USABLE, MetadataCopies::Two, false).unwrap();
        }
    }
    assert_eq!((gone, table.stats().nodes), (501, 0));
    check(&NodeTable::open(&device, roots, USABLE, MetadataCopies::Two, true).unwrap());
}

#[test]
fn freed_space_waits_for_the_commit_to_be_durable() {
    let device = memory();
    let (table, _) = fresh(&device);
    let first = commit(&table, vec![node(&table, 1, 100 << 20, &[])], 1);
    table.committed(first);
    let second = commit(&table, vec![], 0);
    assert!(table.stats().pending_free >= 100 << 20);
    assert!(matches!(
        table.space().alloc(100 << 20),
        Err(Error::NoSpace { .. })
    ));
    table.committed(second);
    assert_eq!(table.stats().pending_free, 0);
    assert!(table.space().alloc(100 << 20).is_ok());
}

#[test]
fn an_extent_that_no_commit_names_is_free_after_a_crash() {
    let device = memory();
    let (table, roots) = fresh(&device);
    let free = table.stats().free;
    table.space().alloc(10 << 20).unwrap();
    let back = table.space().alloc(1 << 20).unwrap();
    table.space().free_unpublished(back);
    assert_eq!(table.stats().free, free - (10 << 20));
    let second = commit(&table, vec![node(&table, 1, 4096, &[])], 1);
    check(&table);
    drop(second);
    let table = NodeTable::open(&device, roots, USABLE, MetadataCopies::Two, false).unwrap();
    assert_eq!(table.stats().free, free);
    check(&table);
}

#[test]
fn a_commit_without_changes_writes_nothing() {
    let device = memory();
    let (table, _) = fresh(&device);
    let first = commit(&table, vec![node(&table, 1, 4096, &[])], 1);
    let roots = first.roots;
    table.committed(first);
    let second = commit(&table, vec![], 1);
    assert_eq!((second.roots, second.removed.len()), (roots, 0));
    table.committed(second);
}

#[test]
fn a_commit_into_a_full_volume_lives_on_the_reserve() {
    let device = memory();
    let (table, _) = fresh(&device);
    let mut new = Vec::new();
    while let Ok(extent) = table.space().alloc(65_536) {
        let id = NodeId(new.len() as u64 + 1);
        let kind = NodeKind::Leaf;
        let children = vec![];
        new.push(NewNode {
            id,
            extent,
            offset: 0,
            copy: None,
            used_bytes: 1,
            checksum: 0,
            kind,
            height: 0,
            children,
        });
    }
    let count = new.len() as u64;
    let extent = table.space().alloc_reserved(65_536).unwrap();
    let children = (1..=count).map(NodeId).collect();
    let (id, kind) = (NodeId(count + 1), NodeKind::Skeleton);
    new.push(NewNode {
        id,
        extent,
        offset: 0,
        copy: None,
        used_bytes: 1,
        checksum: 0,
        kind,
        height: 1,
        children,
    });
    let full = table.commit(new, Some(id), usize::MAX, &|_| false).unwrap();
    table.committed(full);
    check(&table);
    assert!(
        table.stats().free >= table.stats().reserved / 2,
        "{:?}",
        table.stats()
    );
    let empty = commit(&table, vec![], 0);
    table.committed(empty);
    check(&table);
    assert!(table.stats().free > 126 << 20);
}

#[test]
fn mistakes_of_the_caller_are_refused_and_change_nothing() {
    type Mistake = fn(&NodeTable) -> Vec<NewNode>;
    let mistakes: [(&str, Mistake); 5] = [
        ("names a node that is not there", |t| {
            vec![node(t, 2, 4096, &[77])]
        }),
        ("reuses a number", |t| vec![node(t, 1, 4096, &[])]),
        ("number 0", |t| vec![node(t, 0, 4096, &[])]),
        ("uses more than it has", |t| {
            vec![NewNode {
                used_bytes: 4097,
                ..node(t, 2, 4096, &[])
            }]
        }),
        ("space that was not allocated", |t| {
            let extent = Extent::new(USABLE.end() - 4096, 4096);
            vec![NewNode {
                extent,
                ..node(t, 2, 4096, &[])
            }]
        }),
    ];
    for (what, mistake) in mistakes {
        let device = memory();
        let (table, _) = fresh(&device);
        let first = commit(&table, vec![node(&table, 1, 4096, &[])], 1);
        let roots = first.roots;
        table.committed(first);
        let (new, before) = (mistake(&table), table.stats());
        let got = table.commit(new, Some(NodeId(1)), 0, &|_| false);
        assert!(matches!(got, Err(Error::Corrupt { .. })), "{what}: {got:?}");
        assert_eq!(table.stats(), before, "{what}");
        assert_eq!(table.get(NodeId(1)).unwrap().unwrap().refs, 1, "{what}");
        check(&NodeTable::open(&device, roots, USABLE, MetadataCopies::Two, true).unwrap());
        let right = node(&table, 3, 4096, &[1]);
        let next = table.commit(vec![right], Some(NodeId(3)), 0, &|_| false);
        table.committed(next.unwrap());
        assert_eq!(table.get(NodeId(1)).unwrap().unwrap().refs, 1, "{what}");
    }
}

#[test]
fn a_commit_that_panics_is_the_last_one() {
    let (table, _) = fresh(&memory());
    let first = commit(&table, vec![node(&table, 1, 4096, &[])], 1);
    table.committed(first);
    let panics = |_| panic!("injected");
    let done = catch_unwind(AssertUnwindSafe(|| {
        table.commit(
            vec![node(&table, 2, 4096, &[])],
            Some(NodeId(2)),
            9,
            &panics,
        )
    }));
    assert!(done.is_err());
    let next = table.commit(vec![], Some(NodeId(1)), 9, &|_| false);
    assert!(matches!(next, Err(Error::Poisoned)), "{next:?}");
    assert!(matches!(table.space().alloc(4096), Err(Error::Poisoned)));
}

#[test]
fn read_only_takes_no_changes() {
    let device = memory();
    let (_, roots) = fresh(&device);
    let table = NodeTable::open(&device, roots, USABLE, MetadataCopies::Two, true).unwrap();
    assert!(matches!(table.space().alloc(1), Err(Error::ReadOnly)));
    assert!(matches!(
        table.commit(vec![], None, 0, &|_| false),
        Err(Error::ReadOnly)
    ));
}

#[test]
fn readers_never_fail_while_checkpoints_reuse_their_pages() {
    let device = memory();
    let (table, _) = fresh(&device);
    let count = 3000u64;
    let mut new: Vec<_> = (1..=count).map(|id| node(&table, id, 4096, &[])).collect();
    new.push(node(
        &table,
        count + 1,
        4096,
        &(1..=count).collect::<Vec<_>>(),
    ));
    let first = commit(&table, new, count + 1);
    table.committed(first);
    let (stop, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for seed in 0..3 {
            let (table, stop, reads) = (&table, &stop, &reads);
            scope.spawn(move || {
                let mut rng = StdRng::seed_from_u64(seed);
                while !stop.load(Ordering::Relaxed) {
                    let id = rng.random_range(1..=count);
                    let record = table.get(NodeId(id)).unwrap().unwrap();
                    assert_eq!(record.checksum, id * 7);
                    table.stats();
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for round in 0..200 {
            let (root, id) = (count + 1, count + 2 + round);
            // A new root over the old one, each commit rewrites counts all over the table.
            let twice: Vec<u64> = (1..=count)
                .filter(|n| n % 200 == round)
                .chain([root])
                .collect();
            let next = commit(&table, vec![node(&table, id, 4096, &twice)], id);
            table.committed(next);
            table.committed(commit(&table, vec![], id));
            let back = table
                .commit(vec![], Some(NodeId(root)), usize::MAX, &|_| false)
                .unwrap();
            table.committed(back);
        }
        stop.store(true, Ordering::Relaxed);
    });
    println!("{} reads", reads.load(Ordering::Relaxed));
    check(&table);
}

#[test]
fn a_large_commit_is_quick() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(512 << 20));
    let usable = Extent::new(1 << 20, 511 << 20);
    let roots = NodeTable::format(&device, usable, MetadataCopies::Two).unwrap();
    let table = NodeTable::open(&device, roots, usable, MetadataCopies::Two, false).unwrap();
    let leaves: Vec<u64> = (1..=20_000).collect();
    let mut new: Vec<_> = leaves
        .iter()
        .map(|id| node(&table, *id, 4096, &[]))
        .collect();
    new.extend((0..2000).map(|n| {
        let from = n as usize * 10;
        let children: Vec<u64> = (0..64).map(|k| leaves[(from + k) % leaves.len()]).collect();
        node(&table, 30_000 + n, 8192, &children)
    }));
    new.push(node(
        &table,
        40_000,
        8192,
        &(30_000..32_000).collect::<Vec<_>>(),
    ));
    let start = Instant::now();
    let first = commit(&table, new, 40_000);
    println!("first: {} new nodes: {:?}", 22_001, start.elapsed());
    table.committed(first);
    // The usual checkpoint: 2,000 nodes replaced by versions that name mostly the same children.
    let mut new: Vec<_> = (0..2000)
        .map(|n| {
            let from = n as usize * 10;
            let children: Vec<u64> = (0..64).map(|k| leaves[(from + k) % leaves.len()]).collect();
            node(&table, 50_000 + n, 8192, &children)
        })
        .collect();
    new.push(node(
        &table,
        60_000,
        8192,
        &(50_000..52_000).collect::<Vec<_>>(),
    ));
    let start = Instant::now();
    let second = commit(&table, new, 60_000);
    let elapsed = start.elapsed();
    println!(
        "second: 2,001 new and {} removed nodes: {elapsed:?}",
        second.removed.len()
    );
    table.committed(second);
    check(&table);
    assert!(
        elapsed.as_millis() < 3000,
        "far beyond the 300 ms of an idle machine"
    );
}

type Hook = Box<dyn FnOnce() + Send>;

/// Runs a hook once, before the next read.
struct Interrupting {
    inner: MemDevice,
    hook: Mutex<Option<Hook>>,
}

impl Device for Interrupting {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        let hook = self.hook.lock().unwrap().take();
        if let Some(hook) = hook {
            hook();
        }
        self.inner.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.inner.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        // The bytes that a reader must not come to see.
        self.inner.write_at(addr, &vec![0xdd; len_bytes as usize])
    }
}

#[test]
fn a_reader_overtaken_by_checkpoints_starts_again() {
    let inner = MemDevice::new(USABLE.end());
    let interrupting = Arc::new(Interrupting {
        inner,
        hook: Mutex::new(None),
    });
    let device: Arc<dyn Device> = interrupting.clone();
    let (table, _) = fresh(&device);
    let leaves: Vec<u64> = (1..=3000).collect();
    let mut new: Vec<_> = leaves
        .iter()
        .map(|id| node(&table, *id, 4096, &[]))
        .collect();
    new.push(node(&table, 3001, 4096, &leaves));
    let first = commit(&table, new, 3001);
    let roots = first.roots;
    table.committed(first);
    let table =
        Arc::new(NodeTable::open(&device, roots, USABLE, MetadataCopies::Two, false).unwrap());
    let overtaking = table.clone();
    let interrupt = Box::new(move || {
        let all: Vec<u64> = (1..=3001).collect();
        let next = commit(&overtaking, vec![node(&overtaking, 3002, 4096, &all)], 3002);
        overtaking.committed(next);
    });
    *interrupting.hook.lock().unwrap() = Some(interrupt);
    assert_eq!(table.get(NodeId(1500)).unwrap().unwrap().refs, 2);
    assert!(
        interrupting.hook.lock().unwrap().is_none(),
        "the reader had to read"
    );
    check(&table);
}

/// Fails the n-th write (or read) from now on, and every later one.
struct Failing {
    inner: MemDevice,
    left: AtomicU64,
    reads: bool,
}

impl Failing {
    fn step(&self) -> io::Result<()> {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        if left == 0 {
            Err(io::Error::other("injected"))
        } else {
            Ok(())
        }
    }
}

impl Device for Failing {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        if self.reads {
            self.step()?;
        }
        self.inner.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        if !self.reads {
            self.step()?;
        }
        self.inner.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        self.inner.sync()
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.inner.discard(addr, len_bytes)
    }
}

/// One commit with the n-th write or read failing; says whether it got through.
fn commit_with_fault(reads: bool, fail_at: u64) -> bool {
    let left = AtomicU64::new(u64::MAX);
    let failing = Arc::new(Failing {
        inner: MemDevice::new(USABLE.end()),
        left,
        reads,
    });
    let device: Arc<dyn Device> = failing.clone();
    let (table, _) = fresh(&device);
    let mut new: Vec<_> = (1..=3000).map(|id| node(&table, id, 4096, &[])).collect();
    new.push(node(&table, 3001, 4096, &(1..=3000).collect::<Vec<_>>()));
    let first = commit(&table, new, 3001);
    let roots = first.roots;
    table.committed(first);
    let before = records(&table);
    // Opened anew, nothing is cached, and the commit has to read.
    let table = NodeTable::open(&device, roots, USABLE, MetadataCopies::Two, false).unwrap();
    let next = node(&table, 3002, 4096, &(1..=1500).collect::<Vec<_>>());
    failing.left.store(fail_at, Ordering::Relaxed);
    let space = table.stats();
    let again = reads.then(|| next.clone());
    let got = table.commit(vec![next], Some(NodeId(3002)), usize::MAX, &|_| false);
    failing.left.store(u64::MAX, Ordering::Relaxed);
    if let Ok(commit) = got {
        table.committed(commit);
        check(&table);
        return true;
    }
    assert!(matches!(&got, Err(Error::Io(error)) if (error.call == Call::Read) == reads));
    if let Some(next) = again {
        assert_eq!(table.stats(), space);
        assert_eq!(records(&table), before);
        let got = table.commit(vec![next], Some(NodeId(3002)), usize::MAX, &|_| false);
        table.committed(got.unwrap());
        check(&table);
        return false;
    }
    assert!(matches!(
        table.commit(vec![], None, 0, &|_| false),
        Err(Error::Poisoned)
    ));
    let table = NodeTable::open(&device, roots, USABLE, MetadataCopies::Two, false).unwrap();
    check(&table);
    assert_eq!(records(&table), before);
    false
}

#[test]
fn a_failed_write_harms_nothing_durable_and_a_failed_read_only_its_commit() {
    for reads in [false, true] {
        let faults = (0..)
            .take_while(|fail_at| !commit_with_fault(reads, *fail_at))
            .count();
        println!("{faults} faults, reads: {reads}");
        assert!(faults > 0);
    }
}

#[test]
fn flipped_bytes_are_corrupt_and_never_a_panic() {
    let device = memory();
    let (table, _) = fresh(&device);
    let mut new: Vec<_> = (1..=400).map(|id| node(&table, id, 4096, &[])).collect();
    new.push(node(&table, 401, 4096, &(1..=400).collect::<Vec<_>>()));
    let first = commit(&table, new, 401);
    let roots = first.roots;
    table.committed(first);
    drop(table);
    let mut rng = StdRng::seed_from_u64(number("RAMET_SEED", 3));
    let pages = [roots.node_table.addr, roots.space_map.addr];
    let mut noticed = 0;
    for round in 0..400 {
        // Roots surely, and any place near them, where the other pages are.
        let at = match round % 4 {
            0 => pages[0] + rng.random_range(0..8192),
            1 => pages[1] + rng.random_range(0..4096),
            _ => USABLE.addr + rng.random_range(0..3 << 20),
        };
        let mut byte = [0];
        device.read_at(at, &mut byte).unwrap();
        let flipped = [byte[0] ^ rng.random_range(1..=255u8)];
        device.write_at(at, &flipped).unwrap();
        let seen =
            NodeTable::open(&device, roots, USABLE, MetadataCopies::Two, true).and_then(|table| {
                for id in (0..=402).step_by(50) {
                    table.get(NodeId(id))?;
                }
                let violations = table.check(&mut |_| {})?;
                Ok(violations.is_empty())
            });
        match seen {
            Ok(true) => assert!(round % 4 > 1, "a flip in a root page went unnoticed"),
            Ok(false) | Err(Error::Corrupt { .. }) => noticed += 1,
            Err(other) => panic!("{other}"),
        }
        device.write_at(at, &byte).unwrap();
    }
    println!("{noticed} of 400 flips hit a page");
    check(&NodeTable::open(&device, roots, USABLE, MetadataCopies::Two, true).unwrap());
}
