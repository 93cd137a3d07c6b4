//! Tables that are forged to name one page many times: no walk visits a page for each way to it.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ramet_block::{Device, Extent, MemDevice, MetadataCopies, PageRef, checksum};

use crate::error::Error;
use crate::page::{Body, IndexEntry, LeafEntry, Link, Page, Place};
use crate::record::{Head, Meta, NewNode, NodeId, NodeKind, SHAPE, record_key};
use crate::table::{NodeTable, TableRoots};
use crate::{OldTable, scrub};

const USABLE: Extent = Extent::new(1 << 20, 15 << 20);
/// Pointers of each index page, all to the page below.
const LINKS: u8 = 200;
const LEVELS: u8 = 3;
/// Reads that are enough for a walk over four pages and an empty map.
const READS_MAX: u64 = 50;

/// A device that counts its reads.
struct Counting {
    device: MemDevice,
    reads: AtomicU64,
}

impl Counting {
    fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }
}

impl Device for Counting {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.device.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.device.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        self.device.sync()
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.device.discard(addr, len_bytes)
    }
}

/// Index pages above the leaf `entry`. `key_of` tells the keys of pointers, by the height of their
/// page and their number.
fn forged(entry: LeafEntry, key_of: fn(u8, u8) -> Vec<u8>) -> (Arc<Counting>, TableRoots) {
    let counting = Arc::new(Counting {
        device: MemDevice::new(USABLE.end()),
        reads: AtomicU64::new(0),
    });
    let device: Arc<dyn Device> = counting.clone();
    let mut roots = NodeTable::format(&device, USABLE, MetadataCopies::One).unwrap();
    let mut body = Body::Leaf(vec![entry]);
    for height in 0..=LEVELS {
        let addr = USABLE.end() - u64::from(SHAPE.page_bytes) * u64::from(height + 1);
        let bytes = Page::new(Place { addr, copy: 0 }, height, body).encode(&SHAPE);
        device.write_at(addr, &bytes).unwrap();
        roots.node_table = PageRef {
            addr,
            copy: 0,
            checksum: checksum(&bytes),
        };
        let link = |number| IndexEntry {
            key: key_of(height + 1, number).into(),
            link: Link::Disk(roots.node_table),
        };
        body = Body::Index((0..LINKS).map(link).collect());
    }
    (counting, roots)
}

/// With keys before those of zombies, so that the table opens.
fn with_a_record() -> (Arc<Counting>, TableRoots) {
    let node = NewNode {
        id: NodeId(1),
        extent: Extent::new(USABLE.addr + (1 << 20), 4096),
        offset: 0,
        copy: None,
        used_bytes: 4096,
        checksum: 1,
        kind: NodeKind::Leaf,
        height: 0,
        children: Vec::new(),
    };
    let (head, _) = Head::of(&node, 1).unwrap();
    let entry = LeafEntry {
        key: record_key(node.id).into(),
        value: head.encode().into(),
    };
    forged(entry, |height, number| vec![0, u8::MAX - height, number])
}

fn open(device: &Arc<Counting>, roots: TableRoots) -> crate::Result<NodeTable> {
    let device: Arc<dyn Device> = device.clone();
    NodeTable::open(&device, roots, USABLE, MetadataCopies::One, true)
}

#[test]
fn scrub_reads_a_page_with_many_pointers_once() {
    let (counting, roots) = with_a_record();
    let table = open(&counting, roots).unwrap();
    let before = counting.reads();
    let (_, bad) = table.scrub(roots);
    let reads = counting.reads() - before;
    assert!(reads < READS_MAX, "{reads} reads");
    let told = |page: &scrub::BadPage| page.error.to_string().contains("S4");
    assert!(!bad.is_empty() && bad.iter().all(told), "{:?}", bad.first());
}

#[test]
fn visit_of_an_old_table_reads_a_page_with_many_pointers_once() {
    let (counting, roots) = with_a_record();
    let device: Arc<dyn Device> = counting.clone();
    let old = OldTable::open(&device, roots.node_table, USABLE, MetadataCopies::One).unwrap();
    let before = counting.reads();
    let mut visited = Vec::new();
    let lost = old.visit(&mut |id, _| visited.push(id));
    let reads = counting.reads() - before;
    assert!(reads < READS_MAX, "{reads} reads");
    assert_eq!(visited, [NodeId(1)]);
    assert_eq!(lost, u64::from(LEVELS) * u64::from(LINKS - 1));
    assert_eq!(old.children(NodeId(1)), Some(Vec::new()));
    assert_eq!(old.children(NodeId(2)), None);
}

#[test]
fn check_ends_at_a_page_with_many_pointers() {
    let (counting, roots) = with_a_record();
    let table = open(&counting, roots).unwrap();
    let before = counting.reads();
    let mut steps = 0;
    let violations = table.check(&mut |_| steps += 1).unwrap();
    let reads = counting.reads() - before;
    assert!(reads < READS_MAX && steps == 0, "{reads} reads, {steps}");
    let s4 = violations.iter().filter(|found| found.invariant == "S4");
    assert_eq!(s4.count(), usize::from(LEVELS) * usize::from(LINKS - 1));
}

/// The zombies are read when a table is opened.
#[test]
fn table_that_names_a_page_many_times_does_not_open() {
    let entry = LeafEntry {
        key: Meta::KEY.into(),
        value: Meta::default().encode().into(),
    };
    let (counting, roots) = forged(entry, |_, number| match number {
        0 => Vec::new(),
        _ => vec![3, number],
    });
    match open(&counting, roots).map(drop) {
        Err(Error::Corrupt { detail, .. }) => assert!(detail.contains("S1"), "{detail}"),
        other => panic!("{other:?}"),
    }
}
