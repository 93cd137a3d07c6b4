//! The cost of reads: requests to the device per lookup and per scan, counted.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use ramet_betree::{Batch, Error, FormatOptions, OpenOptions, Tree, TreeShape};
use ramet_block::{Codec, Device, MemDevice};

const KEYS: u64 = 60_000;
const VALUE: [u8; 100] = [7; 100];

fn open(dev: &Arc<dyn Device>, cache_bytes: u64, manual: bool) -> Tree {
    // Most keys go down to the leaves.
    let shape = TreeShape {
        memory_bytes: 1 << 20,
        buffer_bytes: 2 << 20,
        ..TreeShape::default()
    };
    let options = OpenOptions {
        cache_bytes: Some(cache_bytes),
        shape: Some(shape),
        manual,
        ..OpenOptions::default()
    };
    Tree::open(dev.clone(), options).expect("opens")
}

/// Options of a volume that takes as much space as is written.
fn uncompressed() -> FormatOptions {
    FormatOptions {
        codec: Some(Codec::Raw),
        ..FormatOptions::default()
    }
}

/// Even numbers, in an order that scatters them, so that segments wait in all nodes.
fn filled() -> Arc<dyn Device> {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(128 << 20));
    Tree::format(&dev, &uncompressed()).expect("formats");
    let tree = open(&dev, 8 << 20, true);
    for round in 0..KEYS / 500 {
        let mut batch = Batch::new();
        for n in 0..500 {
            let key = (round * 500 + n) * 0x9e37_79b1 % KEYS;
            batch.put(name(2 * key), VALUE.to_vec());
        }
        tree.apply(batch).expect("there is room");
        if round % 40 == 0 {
            tree.checkpoint().expect("there is room");
        }
    }
    tree.close().expect("closes");
    dev
}

fn name(number: u64) -> Vec<u8> {
    format!("some/folder/{number:012}").into_bytes()
}

/// Loads skeletons and indexes, which a cache of a sensible size holds.
fn warm_up(tree: &Tree) {
    for n in 0..KEYS / 50 {
        tree.get(&name(n * 100 + 1)).expect("reads");
    }
}

#[test]
fn lookups_cost_about_one_read_and_missing_keys_none() {
    let dev = filled();
    let tree = open(&dev, 64 << 20, true);
    warm_up(&tree);
    let before = tree.stats();
    let missing = 5000;
    for n in 0..missing {
        let key = n * 7919 % KEYS * 2 + 1;
        assert_eq!(tree.get(&name(key)).expect("reads"), None, "{key}");
    }
    let after = tree.stats();
    let reads = after.counts.node_reads - before.counts.node_reads;
    println!("{reads} reads for {missing} missing keys");
    assert!(
        reads * 20 <= missing,
        "{reads} reads for {missing} missing keys"
    );
    assert!(after.counts.filter_denials - before.counts.filter_denials >= missing * 98 / 100);

    // Each key from another place, so that few blocks are hit twice.
    let tree = open(&dev, 64 << 20, true);
    warm_up(&tree);
    let before = tree.stats();
    let gets = 300;
    for n in 0..gets {
        let key = n * (KEYS / gets) * 2;
        assert_eq!(
            tree.get(&name(key)).expect("reads").as_deref(),
            Some(&VALUE[..])
        );
    }
    let after = tree.stats();
    let reads = after.counts.node_reads - before.counts.node_reads;
    let bytes = after.counts.bytes_read - before.counts.bytes_read;
    println!("{reads} reads of {bytes} bytes for {gets} keys");
    assert!(reads * 10 <= gets * 12, "{reads} reads for {gets} keys");
    // One basement node of 16 KiB each, and no whole leaf.
    assert!(
        bytes <= reads * (18 << 10),
        "{bytes} bytes in {reads} reads"
    );
}

#[test]
fn scans_read_in_long_requests_and_nothing_outside_of_their_bounds() {
    let dev = filled();
    let tree = open(&dev, 64 << 20, true);
    let mut scan = tree.scan(b"", None);
    let mut count = 0;
    while scan.advance().expect("reads") {
        assert_eq!(scan.key(), name(2 * count));
        assert_eq!(scan.value(), VALUE);
        count += 1;
    }
    assert_eq!(count, KEYS);
    let cold = tree.stats();
    println!(
        "{} reads of {} bytes for all",
        cold.counts.node_reads, cold.counts.bytes_read
    );
    assert!(cold.counts.bytes_read / cold.counts.node_reads >= 64 << 10);
    assert!(cold.counts.bytes_read <= cold.allocated_bytes * 11 / 10);

    let tree = open(&dev, 64 << 20, true);
    let (lo, hi) = (name(KEYS), name(KEYS + 200));
    assert_eq!(tree.scan(&lo, Some(&hi)).count(), 100);
    let short = tree.stats();
    println!(
        "{} reads of {} bytes for a few",
        short.counts.node_reads, short.counts.bytes_read
    );
    assert!(
        short.counts.bytes_read * 10 <= cold.counts.bytes_read,
        "{} bytes",
        short.counts.bytes_read
    );
    assert_eq!(tree.scan(&hi, Some(&lo)).count(), 0);
    assert_eq!(tree.stats().counts.node_reads, short.counts.node_reads);
}

/// A device that logs its requests.
struct Noting {
    medium: Arc<dyn Device>,
    asked: Mutex<Vec<Asked>>,
    /// A byte that no request may touch.
    broken: Option<u64>,
    /// Time of a long read.
    pause: Duration,
}

/// Reads of more bytes are long.
const LONG: u64 = 256 << 10;

#[derive(Clone, Debug, PartialEq)]
enum Asked {
    Expect(Range<u64>),
    Read(Range<u64>),
    ReadAlone(Range<u64>),
    Forget(Range<u64>),
}

impl Asked {
    fn is_long(&self) -> bool {
        matches!(self, Self::Read(range) if range.end - range.start > LONG)
    }
}

impl Noting {
    fn on(medium: Arc<dyn Device>) -> Self {
        Self {
            medium,
            asked: Mutex::default(),
            broken: None,
            pause: Duration::ZERO,
        }
    }

    /// Long reads so far.
    fn long(&self) -> usize {
        let asked = self.asked.lock().expect("no panic");
        asked.iter().filter(|asked| asked.is_long()).count()
    }

    fn take(&self) -> Vec<Asked> {
        std::mem::take(&mut *self.asked.lock().expect("no panic"))
    }

    fn note(&self, asked: Asked) {
        self.asked.lock().expect("no panic").push(asked);
    }
}

impl Device for Noting {
    fn len_bytes(&self) -> u64 {
        self.medium.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        let range = addr..addr + buf.len() as u64;
        if self.broken.is_some_and(|at| range.contains(&at)) {
            return Err(io::Error::other("a bad sector"));
        }
        let asked = Asked::Read(range);
        let is_long = asked.is_long();
        self.note(asked);
        if is_long {
            std::thread::sleep(self.pause);
        }
        self.medium.read_at(addr, buf)
    }

    fn read_alone_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.note(Asked::ReadAlone(addr..addr + buf.len() as u64));
        self.medium.read_at(addr, buf)
    }

    fn expect_read(&self, addr: u64, len_bytes: u64) {
        self.note(Asked::Expect(addr..addr + len_bytes));
    }

    fn forget_read(&self, addr: u64, len_bytes: u64) {
        self.note(Asked::Forget(addr..addr + len_bytes));
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.medium.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        self.medium.sync()
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.medium.discard(addr, len_bytes)
    }
}

#[test]
fn a_scan_shows_all_before_a_bad_sector() {
    let medium = filled();
    let on = |broken| {
        Arc::new(Noting {
            broken,
            ..Noting::on(medium.clone())
        })
    };
    let sound = on(None);
    let dev: Arc<dyn Device> = sound.clone();
    assert_eq!(
        open(&dev, 64 << 20, true).scan(b"", None).eager().count() as u64,
        KEYS
    );
    let longest = sound.take().into_iter().filter_map(|asked| match asked {
        Asked::Read(range) => Some((range.end - range.start, range)),
        Asked::Expect(_) | Asked::ReadAlone(_) | Asked::Forget(_) => None,
    });
    let (len, range) = longest.max_by_key(|(len, _)| *len).expect("it reads");
    assert!(len > 256 << 10, "{len} bytes at most");
    let dev: Arc<dyn Device> = on(Some(range.start + len / 4 * 3));
    let tree = open(&dev, 64 << 20, true);
    let is_lost = |number: &u64| tree.get(&name(2 * number)).is_err();
    let first = (0..KEYS).find(is_lost).expect("a bad sector");
    let tree = open(&dev, 64 << 20, true);
    let shown = tree.scan(b"", None).eager().take_while(Result::is_ok);
    let missed = first - shown.count() as u64;
    // The scan needs the block where its range begins, before the first key in it.
    assert!(missed < 100, "{missed} of {first} keys are not shown");
}

#[test]
fn a_short_scan_has_the_device_read_its_blocks_together() {
    let noting = Arc::new(Noting::on(filled()));
    let dev: Arc<dyn Device> = noting.clone();
    let tree = open(&dev, 64 << 20, true);
    warm_up(&tree);
    let mut most = 0;
    for n in 0..20 {
        noting.take();
        let lo = name(n * KEYS / 10 + 1000);
        let mut scan = tree.scan(&lo, None);
        assert!(scan.advance().expect("reads"));
        let asked = noting.take();
        let expected: Vec<_> = asked
            .iter()
            .filter_map(|asked| match asked {
                Asked::Expect(range) => Some(range.clone()),
                Asked::Read(_) | Asked::ReadAlone(_) | Asked::Forget(_) => None,
            })
            .collect();
        // Apart from indexes, the expected blocks are read then, behind the first block, which is
        // read at once.
        let first = asked.iter().position(|a| matches!(a, Asked::Expect(_)));
        let read = first.map_or(&[][..], |first| &asked[first + expected.len()..]);
        let wanted = expected.iter().cloned().map(Asked::Read);
        assert!(
            expected.is_empty() || read.iter().skip(1).cloned().eq(wanted),
            "{asked:?}"
        );
        most = most.max(expected.len());
        // The next hundred keys come from these blocks, or in longer requests.
        for _ in 0..100 {
            assert!(scan.advance().expect("reads"));
        }
        assert!(!noting.take().iter().any(|a| matches!(a, Asked::Expect(_))));
        assert!(tree.scan(&lo, None).advance().expect("reads"));
        assert_eq!(noting.take(), [], "all of it is cached");
    }
    assert!(most > 0, "segments lie over the leaves");
}

#[test]
fn short_scans_read_no_more_where_leaves_and_segments_end() {
    let noting = Arc::new(Noting::on(filled()));
    let dev: Arc<dyn Device> = noting.clone();
    // Hardly a block fits the cache.
    let tree = open(&dev, 3 << 20, true);
    let scan = |tree: &Tree, first: u64, len: usize| {
        let (lo, before) = (name(first), tree.stats().counts.bytes_read);
        assert_eq!(tree.scan(&lo, None).take(len).count(), len);
        tree.stats().counts.bytes_read - before
    };
    let everywhere = |tree: &Tree| (0..KEYS / 50 - 2).map(|n| scan(tree, n * 100, 100)).max();
    warm_up(&tree);
    let most = everywhere(&tree).expect("there are scans") >> 10;
    // A hundred keys lie in one block of the leaf or in two, the second of which comes with another
    // block, and in a block of the segments over it.
    println!("at most {most} KiB for a hundred keys");
    assert!(most <= 100, "{most} KiB for a hundred keys");
    // For a scan that goes on in growing steps the device reads nothing beyond them before the
    // steps are long.
    noting.take();
    scan(&tree, 0, 2000);
    let asked = noting.take();
    let is_alone = |asked: &Asked| matches!(asked, Asked::ReadAlone(_));
    assert!(asked.iter().any(is_alone), "{asked:?}");
    scan(&tree, 0, KEYS as usize);
    let asked = noting.take();
    assert!(!asked.iter().rev().take(8).any(is_alone), "{asked:?}");
    // Leaves are not read ahead either.
    drop(tree);
    let tree = open(&dev, 3 << 20, false);
    everywhere(&tree);
    assert_eq!(tree.stats().counts.leaves_ahead, 0);
    scan(&tree, 0, KEYS as usize);
    assert!(
        tree.stats().counts.leaves_ahead > 0,
        "leaves are asked for ahead"
    );
}

#[test]
fn messages_that_wait_over_many_leaves_are_read_in_long_requests() {
    let dev = filled();
    let scan = |tree: &Tree| {
        let before = tree.stats().counts.node_reads;
        let mut sum = 0u64;
        for item in tree.scan(b"", None) {
            let (key, value) = item.expect("reads");
            sum += u64::from(value[0]) + key.len() as u64;
        }
        (tree.stats().counts.node_reads - before, sum)
    };
    // A scan for each request, as a file is read.
    let by_pieces = |tree: &Tree| {
        let before = tree.stats().counts.node_reads;
        for first in (0..KEYS).step_by(1000) {
            let (lo, hi) = (name(2 * first), name(2 * (first + 1000)));
            assert_eq!(tree.scan(&lo, Some(&hi)).eager().count(), 1000);
        }
        tree.stats().counts.node_reads - before
    };
    let tree = open(&dev, 64 << 20, true);
    let (base, sum) = scan(&tree);
    let mut batch = Batch::new();
    let patches = KEYS / 10;
    for n in 0..patches {
        batch.patch(name(n * 20), 0, vec![8; 16]);
    }
    tree.apply(batch).expect("there is room");
    tree.close().expect("closes");
    drop(tree);
    let tree = open(&dev, 64 << 20, true);
    let (reads, patched) = scan(&tree);
    println!("{base} reads without, {reads} with patches");
    assert_eq!(patched, sum + patches, "each patch raises a byte by one");
    assert!(
        reads <= base + 12,
        "{base} reads without, {reads} with patches"
    );
    let pieces = by_pieces(&open(&dev, 64 << 20, true));
    println!("{pieces} reads by pieces");
    assert!(pieces <= KEYS / 1000 * 5 / 3, "{pieces} reads by pieces");
}

#[test]
fn segments_that_begin_and_end_within_a_leaf_do_not_cut_its_requests() {
    let dev = filled();
    let by_request = |tree: &Tree| {
        let before = tree.stats();
        let (lo, hi) = (name(0), name(KEYS / 5));
        assert_eq!(tree.scan(&lo, Some(&hi)).eager().count() as u64, KEYS / 10);
        let after = tree.stats();
        (
            after.counts.node_reads - before.counts.node_reads,
            after.counts.bytes_read - before.counts.bytes_read,
        )
    };
    let (reads, bytes) = by_request(&open(&dev, 64 << 20, true));
    let tree = open(&dev, 64 << 20, true);
    let segments = 10;
    for n in 0..segments {
        let mut batch = Batch::new();
        batch.put(name(600 * n + 200), vec![9; 100]);
        batch.put(name(2 * KEYS - 600 * n - 200), vec![9; 100]);
        tree.apply(batch).expect("there is room");
        tree.checkpoint().expect("there is room");
    }
    tree.close().expect("closes");
    drop(tree);
    let (with, bytes_with) = by_request(&open(&dev, 64 << 20, true));
    println!("{reads} reads of {bytes} bytes, {with} of {bytes_with} below segments");
    // The segments lie side by side: one request reads all of them, another one the root.
    assert!(with <= reads + 2, "{reads} reads, {with} below segments");
    assert!(bytes_with <= bytes + segments * (20 << 10));
}

const BLOCK: usize = 4096;

/// A device with one file of so many blocks, in leaves that were written at once.
fn with_file(blocks: u64) -> Arc<dyn Device> {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
    Tree::format(&dev, &uncompressed()).expect("formats");
    let tree = open(&dev, 64 << 20, true);
    let block = |number: u64| (Bytes::from(name(number)), Bytes::from(vec![7; BLOCK]));
    let file = tree.prepare(Bytes::new(), None, (0..blocks).map(block));
    let mut batch = Batch::new();
    batch.ingest(Bytes::new(), file.expect("there is room"));
    tree.apply(batch).expect("there is room");
    tree.close().expect("closes");
    dev
}

/// Reads some blocks of the file as a mount does.
fn read_piece(tree: &Tree, blocks: Range<u64>) {
    let count = blocks.end - blocks.start;
    let (lo, hi) = (name(blocks.start), name(blocks.end));
    let scan = tree.scan(&lo, Some(&hi)).eager();
    assert_eq!(
        scan.drop_behind(count as usize * BLOCK).count() as u64,
        count
    );
}

#[test]
fn a_file_that_is_read_in_pieces_takes_its_leaves_whole() {
    const BLOCKS: u64 = 4096;
    /// Blocks of a request; no request ends where a leaf does.
    const PIECE: u64 = 195;
    let dev = with_file(BLOCKS);
    let by_pieces = || {
        let tree = open(&dev, 64 << 20, true);
        let before = tree.stats();
        for first in (0..BLOCKS).step_by(PIECE as usize) {
            read_piece(&tree, first..BLOCKS.min(first + PIECE));
        }
        let after = tree.stats();
        let reads = after.counts.node_reads - before.counts.node_reads;
        (
            reads,
            after.counts.bytes_read - before.counts.bytes_read,
            after.leaves,
        )
    };
    let (reads, bytes, leaves) = by_pieces();
    println!("{reads} reads of {bytes} bytes of {leaves} leaves");
    assert!(reads <= leaves + 2, "{reads} reads");
    assert!(bytes <= BLOCKS * BLOCK as u64 * 21 / 20, "{bytes} bytes");

    // Segments that begin inside the first leaf and end in the last one.
    let tree = open(&dev, 64 << 20, true);
    let segments = 5;
    for n in 0..segments {
        let mut batch = Batch::new();
        for number in [10 * n + 7, BLOCKS - 10 * n - 7] {
            batch.patch(name(number), 100, vec![9; 16]);
        }
        tree.apply(batch).expect("there is room");
        tree.checkpoint().expect("there is room");
    }
    tree.close().expect("closes");
    drop(tree);
    let (with, ..) = by_pieces();
    println!("{with} reads below segments");
    // One request reads all of them.
    assert!(with <= reads + 2, "{with} reads below segments");
}

#[test]
fn leaves_that_a_mount_keeps_are_not_kept_twice() {
    const BLOCKS: u64 = 4000;
    /// Leaves that may still be wanted.
    const STAY: usize = 8;
    let noting = Arc::new(Noting::on(with_file(BLOCKS)));
    let dev: Arc<dyn Device> = noting.clone();
    let whole = || {
        let (mut read, mut forgotten) = (Vec::new(), Vec::new());
        for asked in noting.take() {
            match asked {
                Asked::Read(range) if range.end - range.start > LONG => read.push(range),
                Asked::Forget(range) => forgotten.push(range),
                _ => {}
            }
        }
        (read, forgotten)
    };
    let tree = open(&dev, 64 << 20, true);
    for first in (0..BLOCKS).step_by(125) {
        read_piece(&tree, first..first + 125);
    }
    let (read, forgotten) = whole();
    assert!(read.len() > STAY + 10, "{} leaves", read.len());
    assert_eq!(forgotten.len(), read.len() - STAY);
    for (forgotten, read) in forgotten.iter().zip(&read) {
        assert_eq!(forgotten.start, read.start);
        assert!(forgotten.end >= read.end && forgotten.end - read.end < 4096);
    }
    drop(tree);
    // A reader without another cache, with threads that read ahead.
    let tree = open(&dev, 64 << 20, false);
    assert_eq!(tree.scan(b"", None).count() as u64, BLOCKS);
    let (read, forgotten) = whole();
    assert!(read.len() > STAY + 10, "{} leaves", read.len());
    assert_eq!(forgotten, []);
}

/// A kernel that reads a file ahead asks for a part while it waits for the part before.
#[test]
fn a_reader_that_waits_for_a_leaf_and_reads_on_does_not_read_it_again() {
    const BLOCKS: u64 = 2000;
    /// Blocks of a request: less than a leaf, which is read whole nevertheless, and an end inside
    /// another leaf.
    const PIECE: u64 = 90;
    let slow = Arc::new(Noting {
        pause: Duration::from_millis(20),
        ..Noting::on(with_file(BLOCKS))
    });
    let dev: Arc<dyn Device> = slow.clone();
    let tree = open(&dev, 64 << 20, true);
    let before = tree.stats();
    let mut together = 0;
    for first in (0..BLOCKS - 2 * PIECE).step_by(2 * PIECE as usize) {
        let long = slow.long();
        let (middle, end) = (first + PIECE, first + 2 * PIECE);
        std::thread::scope(|scope| {
            let piece = scope.spawn(|| read_piece(&tree, first..middle));
            let reads = || slow.long() > long;
            while !reads() && !piece.is_finished() {
                std::thread::yield_now();
            }
            together += u32::from(reads());
            read_piece(&tree, middle..end);
        });
    }
    let after = tree.stats();
    let reads = after.counts.node_reads - before.counts.node_reads;
    println!(
        "{reads} reads of {} leaves, {together} together",
        after.leaves
    );
    assert!(together > 5);
    assert!(reads <= after.leaves + 2, "{reads} reads");
}

#[test]
fn wanted_segments_that_lie_side_by_side_are_read_together() {
    let dev = filled();
    let read = || {
        let tree = open(&dev, 64 << 20, true);
        let before = tree.stats().counts.node_reads;
        let (lo, hi) = (name(0), name(KEYS / 5));
        tree.scan(&lo, Some(&hi)).eager().for_each(|item| {
            item.expect("reads");
        });
        tree.stats().counts.node_reads - before
    };
    let without = read();
    let tree = open(&dev, 64 << 20, true);
    // Segments of some 40 KB each: too long to come along where they are not wanted.
    let segments = 6;
    for n in 0..segments {
        let mut batch = Batch::new();
        for number in 0..300 {
            batch.put(name(2 * (number * 200 + n) + 1), vec![9; 100]);
        }
        tree.apply(batch).expect("there is room");
        tree.checkpoint().expect("there is room");
    }
    tree.close().expect("closes");
    drop(tree);
    let with = read();
    println!("{without} reads, {with} with {segments} segments more");
    assert!(with <= without + 3, "{with} reads");
}

#[test]
fn skeletons_that_lie_side_by_side_are_read_together() {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(128 << 20));
    // Many small leaves in narrow nodes.
    let shape = TreeShape {
        leaf_bytes: 16 << 10,
        fanout: 8,
        memory_bytes: 1 << 20,
        buffer_bytes: 64 << 10,
        ..TreeShape::default()
    };
    let format = FormatOptions {
        shape: Some(shape.clone()),
        ..uncompressed()
    };
    Tree::format(&dev, &format).expect("formats");
    let open = || {
        let options = OpenOptions {
            cache_bytes: Some(64 << 20),
            shape: Some(shape.clone()),
            manual: true,
            ..OpenOptions::default()
        };
        Tree::open(dev.clone(), options).expect("opens")
    };
    let tree = open();
    for first in (0..KEYS).step_by(500) {
        let mut batch = Batch::new();
        for number in first..first + 500 {
            batch.put(name(number), VALUE.to_vec());
        }
        tree.apply(batch).expect("there is room");
    }
    tree.close().expect("closes");
    drop(tree);
    let tree = open();
    let before = tree.stats();
    assert_eq!(tree.scan(b"", None).eager().count() as u64, KEYS);
    let after = tree.stats();
    let skeletons = after.nodes - after.leaves - after.segments;
    let reads = after.counts.node_reads - before.counts.node_reads;
    println!(
        "{reads} reads of {} leaves, {} segments and {skeletons} skeletons",
        after.leaves, after.segments
    );
    assert!(skeletons > 50);
    assert!(reads < after.leaves + after.segments + skeletons / 2);
}

/// The number of logged requests that bring blocks which are not in `cached` yet: the seeks of a
/// disk.
fn jumps(asked: &[Asked], cached: &mut HashSet<u64>) -> usize {
    let mut is_new = |asked: &&Asked| {
        let (Asked::Expect(range) | Asked::Read(range) | Asked::ReadAlone(range)) = asked else {
            return false;
        };
        let blocks = range.start / 4096..range.end.div_ceil(4096);
        blocks.filter(|block| cached.insert(*block)).count() > 0
    };
    asked.iter().filter(&mut is_new).count()
}

#[test]
fn opening_brings_along_the_pages_of_the_newest_checkpoints() {
    let device = filled();
    // A clone of all keys, and checkpoints after it.
    for number in 0..4u64 {
        let tree = open(&device, 64 << 20, true);
        let mut batch = Batch::new();
        match number {
            1 => batch.clone_range(name(0), Some(name(KEYS).into()), 4, "clone"),
            _ => batch.put(format!("z{number}"), "z"),
        }
        tree.apply(batch).expect("there is room");
        tree.close().expect("closes");
    }
    let noting = Arc::new(Noting::on(device));
    let device: Arc<dyn Device> = noting.clone();
    let tree = open(&device, 64 << 20, true);
    let mut cached = HashSet::new();
    let opening = jumps(&noting.take(), &mut cached);
    let first = tree.scan(b"clone", None).next().expect("a clone");
    let (key, _) = first.expect("reads");
    let more = jumps(&noting.take(), &mut cached);
    println!("{key:?}: {opening} jumps to open, {more} more");
    assert!(more <= 2, "index and block of a leaf");
}

#[test]
fn scans_that_read_ahead_see_the_same() {
    let dev = filled();
    let tree = open(&dev, 2 << 20, false);
    for _ in 0..2 {
        let all: Vec<_> = tree.scan(b"", None).map(|e| e.expect("reads")).collect();
        assert_eq!(all.len() as u64, KEYS);
        let sorted = all.iter().zip(0..).all(|((key, _), n)| *key == name(2 * n));
        assert!(sorted, "keys are missing or out of order");
    }
    assert!(
        tree.stats().counts.leaves_ahead > 0,
        "nothing was read ahead"
    );
    // A scan that ends early takes back its jobs.
    assert_eq!(tree.scan(b"", None).take(20_000).count(), 20_000);
    tree.close().expect("closes");
}

#[test]
fn a_scan_leaves_blocks_that_are_used_often_in_the_cache() {
    let dev = filled();
    let tree = open(&dev, 4 << 20, true);
    let hot = || {
        for n in 0..60 {
            tree.get(&name(n * 1000)).expect("reads");
        }
    };
    for _ in 0..5 {
        hot();
    }
    let reads = || tree.stats().counts.node_reads;
    let before = reads();
    hot();
    assert_eq!(reads(), before, "the keys fit the cache");
    assert_eq!(tree.scan(b"", None).count() as u64, KEYS);
    let scanned = reads();
    hot();
    let again = reads() - scanned;
    println!("{again} reads again");
    assert!(again <= 20, "{again} of 60 had to be read again");
}

/// A filter that lost a bit would deny existing keys.
#[test]
fn damage_to_a_filter_is_reported() {
    let dev = filled();
    let mut header = [0; 32];
    let mut damaged = 0;
    for addr in (0..dev.len_bytes()).step_by(4096) {
        dev.read_at(addr, &mut header).expect("in memory");
        let word = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four"));
        if !header.starts_with(b"RRUN\x01") || word(24) == 0 {
            continue;
        }
        let last = addr + u64::from(word(8)) - 1;
        let mut byte = [0];
        dev.read_at(last, &mut byte).expect("in memory");
        dev.write_at(last, &[byte[0] ^ 1]).expect("in memory");
        damaged += 1;
    }
    assert!(damaged > 0, "no leaf has a filter");
    let tree = open(&dev, 8 << 20, true);
    for n in 0..100 {
        match tree.get(&name(n * KEYS / 100 * 2)) {
            Err(Error::Corrupt { what, .. }) => assert_eq!(what, "front of a run"),
            // A segment holds the key.
            Ok(value) => assert!(value.is_some(), "key {n} is denied"),
            Err(error) => panic!("key {n}: {error}"),
        }
    }
    assert!(
        tree.get(&name(2 * KEYS / 2)).is_err(),
        "most keys are in leaves"
    );
}
