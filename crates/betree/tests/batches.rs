//! The changes of a batch happen in order.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use ramet_betree::{
    Applied, Batch, FormatOptions, OpenOptions, StructuralPath, Tree, TreeShape,
    successor_of_prefix,
};
use ramet_block::{Budget, Device, MemDevice, Use};

#[test]
fn clones_of_a_batch_see_the_operations_before_them() {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
    Tree::format(&dev, &FormatOptions::default()).expect("formats");
    let options = OpenOptions {
        manual: true,
        ..OpenOptions::default()
    };
    let tree = Tree::open(dev, options).expect("opens");
    // More than a clone copies.
    let mut batch = Batch::new();
    for number in 0..1000u32 {
        batch.put([b"a", &number.to_be_bytes()[..]].concat(), vec![1; 100]);
    }
    tree.apply(batch).expect("there is room");
    tree.checkpoint().expect("there is room");

    let key = |prefix: &[u8]| [prefix, b"extra"].concat();
    let mut batch = Batch::new();
    batch.put(key(b"a"), "new");
    batch.clone_prefix("a", "b");
    batch.clone_prefix("b", "c");
    batch.delete(key(b"b"));
    batch.clone_prefix("b", "d");
    batch.delete_prefix("a");
    batch.clone_prefix("a", "e");
    batch.clone_prefix("d", "d2");
    // No operation of the batch before this one touches its source.
    batch.clone_prefix("z", "f");
    tree.apply(batch).expect("there is room");

    let get = |prefix: &[u8]| tree.get(&key(prefix)).expect("reads");
    assert_eq!(get(b"c").as_deref(), Some(&b"new"[..]));
    assert_eq!((get(b"b"), get(b"d")), (None, None));
    let count = |prefix: &[u8]| {
        let end = successor_of_prefix(prefix);
        tree.scan(prefix, end.as_deref()).count()
    };
    let counts = [b"a", b"b", b"c", b"e", b"f"].map(|prefix| count(prefix));
    assert_eq!(counts, [0, 1000, 1001, 0, 0]);
    // A copy of a range into itself has the state before the copy.
    assert_eq!((count(b"d"), count(b"d2")), (2000, 1000));
    assert!(tree.verify(&mut |_| {}).expect("reads").is_empty());
}

#[test]
fn a_small_range_is_copied_with_all_messages_for_it() {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
    Tree::format(&dev, &FormatOptions::default()).expect("formats");
    let options = OpenOptions {
        manual: true,
        ..OpenOptions::default()
    };
    let tree = Tree::open(dev, options).expect("opens");
    let key = |prefix: &str, number: u32| format!("{prefix}{number:03}");
    let mut batch = Batch::new();
    for number in 0..1000 {
        batch.put(key("other", number), vec![1; 1000]);
    }
    tree.apply(batch).expect("there is room");
    // As many segments as a node has before they are merged.
    for round in 0..10u8 {
        let mut batch = Batch::new();
        for number in 0..50 {
            match number % 5 {
                0 if round == 8 => batch.delete(key("a", number)),
                1 if round > 0 => batch.patch(key("a", number), u32::from(round), vec![round; 3]),
                _ => batch.put(key("a", number), vec![round; 200]),
            }
        }
        tree.apply(batch).expect("there is room");
        tree.checkpoint().expect("there is room");
    }
    let seen = |prefix: &str| -> Vec<_> {
        let end = successor_of_prefix(prefix.as_bytes());
        let all = tree.scan(prefix.as_bytes(), end.as_deref());
        all.map(|item| item.expect("reads"))
            .map(|(key, value)| (key.slice(prefix.len()..), value))
            .collect()
    };
    let before = seen("a");
    let mut batch = Batch::new();
    batch.delete_prefix("a01");
    tree.apply(batch).expect("there is room");
    let cut: Vec<_> = before
        .iter()
        .filter(|(k, _)| !k.starts_with(b"01"))
        .collect();
    let mut batch = Batch::new();
    batch.clone_prefix("a", "copy");
    tree.apply(batch).expect("there is room");
    assert!(seen("copy").iter().eq(cut.iter().copied()));
    assert_eq!(cut.len(), 40);
    assert_eq!(
        tree.stats().paths[StructuralPath::Unshares],
        0,
        "a node was made to be shared"
    );
    let mut batch = Batch::new();
    batch.put(key("copy", 1), "of the copy");
    batch.put(key("a", 2), "of the source");
    tree.apply(batch).expect("there is room");
    assert_eq!(&seen("copy")[1].1[..], b"of the copy");
    assert_eq!(&seen("a")[1].1[..], &cut[1].1[..]);
    assert_eq!(&seen("copy")[2].1[..], &cut[2].1[..]);
    assert!(tree.verify(&mut |_| {}).expect("reads").is_empty());
}

#[test]
fn an_optimistic_capture_serves_a_clone_only_while_the_state_is_the_same() {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
    Tree::format(&dev, &FormatOptions::default()).expect("formats");
    let options = OpenOptions {
        manual: true,
        shape: Some(TreeShape {
            clone_copy_bytes: COPIED_BYTES,
            ..TreeShape::default()
        }),
        ..OpenOptions::default()
    };
    let tree = Tree::open(dev, options).expect("opens");
    let put = |key: &str, value: &str| {
        let mut batch = Batch::new();
        batch.put(key.to_owned(), value.to_owned());
        tree.apply(batch).expect("there is room");
    };
    let mut batch = Batch::new();
    for number in 0..1000u32 {
        batch.put(format!("large{number}"), vec![1; 100]);
        batch.put(format!("small{}", number % 10), vec![1; 10]);
    }
    tree.apply(batch).expect("there is room");
    tree.checkpoint().expect("there is room");
    let get = |key: &str| tree.get(key.as_bytes()).expect("reads");
    for (round, source) in ["large", "small", "large", "small"].into_iter().enumerate() {
        put(&format!("{source}0"), &format!("before {round}"));
        tree.prepare_clone(
            source.as_bytes(),
            successor_of_prefix(source.as_bytes()).as_deref(),
        )
        .expect("reads");
        let changes = round < 2;
        if changes {
            put(&format!("{source}0"), &format!("after {round}"));
        }
        let visits = ["first", "second"].map(|copy| {
            let before = tree.stats().counts.node_visits;
            let mut batch = Batch::new();
            batch.clone_prefix(source, format!("{round}{copy}"));
            tree.apply(batch).expect("there is room");
            tree.stats().counts.node_visits - before
        });
        // A small range is copied, and captured in the tree only the first time.
        let is_small = source == "small";
        let expected = [!changes || is_small, is_small];
        assert_eq!(visits.map(|n| n == 0), expected, "{visits:?}");
        let expected = format!("{} {round}", if changes { "after" } else { "before" });
        for copy in ["first", "second"] {
            let found = get(&format!("{round}{copy}0"));
            assert_eq!(found.as_deref(), Some(expected.as_bytes()));
            assert!(get(&format!("{round}{copy}9")).is_some());
        }
    }
    put("small0", "last");
    for prefix in ["large", "small", "0", "1", "2", "3"] {
        tree.prepare_clone(
            prefix.as_bytes(),
            successor_of_prefix(prefix.as_bytes()).as_deref(),
        )
        .expect("reads");
    }
    let mut batch = Batch::new();
    for prefix in ["large", "small", "0", "1", "2", "3"] {
        batch.delete_prefix(prefix);
    }
    tree.apply(batch).expect("there is room");
    for _ in 0..3 {
        tree.checkpoint().expect("there is room");
    }
    let zombies = tree.stats().zombies;
    assert_eq!(zombies, 0, "unused nodes are kept");
    assert!(tree.verify(&mut |_| {}).expect("reads").is_empty());
}

/// Memory buffer of [`tree_of_small_buffers`], in bytes.
/// Small sources of these tests are copied by their clones.
const COPIED_BYTES: usize = 4 << 10;
const MEMORY_BYTES: usize = 256 << 10;

/// A tree without background work.
fn tree_of_small_buffers() -> Tree {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
    let shape = TreeShape {
        clone_copy_bytes: COPIED_BYTES,
        memory_bytes: MEMORY_BYTES,
        ..TreeShape::default()
    };
    let format = FormatOptions {
        shape: Some(shape.clone()),
        ..FormatOptions::default()
    };
    Tree::format(&dev, &format).expect("formats");
    let options = OpenOptions {
        manual: true,
        shape: Some(shape),
        ..OpenOptions::default()
    };
    Tree::open(dev, options).expect("opens")
}

#[test]
fn a_small_source_is_captured_once_for_each_memory_buffer() {
    let tree = tree_of_small_buffers();
    let apply = |batch: Batch| tree.apply(batch).expect("there is room");
    let mut batch = Batch::new();
    for number in 0..20u32 {
        batch.put(format!("s{number:02}"), vec![1; 10]);
        batch.put(format!("other{number:02}"), vec![2; 20]);
    }
    apply(batch);
    let mut copies = 0;
    // Checks that the copy is right, and returns whether no node of the tree was visited for it.
    let mut copies_unseen = |what: &str| {
        copies += 1;
        let copy = format!("copy{copies}");
        let before = tree.stats().counts.node_visits;
        let mut batch = Batch::new();
        batch.clone_prefix("s", copy.clone());
        apply(batch);
        let visits = tree.stats().counts.node_visits - before;
        let seen = |prefix: &str| -> Vec<(Vec<u8>, Vec<u8>)> {
            let hi = successor_of_prefix(prefix.as_bytes());
            let all = tree.scan(prefix.as_bytes(), hi.as_deref());
            all.map(|item| item.expect("reads"))
                .map(|(key, value)| (key[prefix.len()..].to_vec(), value.to_vec()))
                .collect()
        };
        assert_eq!(seen(&copy), seen("s"), "{what}");
        visits == 0
    };
    for buffer in 0..3u8 {
        let mut batch = Batch::new();
        batch.put("s08", vec![buffer; 8]);
        for number in 0..MEMORY_BYTES / 1000 {
            batch.put(format!("z{number}"), vec![buffer; 1000]);
        }
        apply(batch);
        assert!(!copies_unseen("in a new buffer"));
        tree.checkpoint().expect("there is room");
        assert!(!copies_unseen("in a new buffer, from leaves"));
        assert!(copies_unseen("again"));
        let mut batch = Batch::new();
        batch.put("s03", vec![buffer; 5]);
        batch.delete("s04");
        batch.patch("s05", 8, vec![buffer; 9]);
        batch.patch("s90", 3, vec![buffer; 2]);
        apply(batch);
        assert!(copies_unseen("points"));
        let mut batch = Batch::new();
        batch.patch("s05", 2, vec![9; 2]);
        batch.put("s04", "back");
        batch.delete("s03");
        apply(batch);
        assert!(copies_unseen("points over these"));
        let mut batch = Batch::new();
        batch.delete_range("s06", Some("s08".into()));
        batch.clone_prefix("other1", "s1");
        apply(batch);
        assert!(!copies_unseen("ranges"));
        let mut batch = Batch::new();
        batch.put("s07", "new");
        apply(batch);
        assert!(!copies_unseen("points over ranges"));
    }
}

#[test]
fn a_source_without_edits_is_captured_once_for_each_root() {
    let tree = tree_of_small_buffers();
    let apply = |batch: Batch| tree.apply(batch).expect("there is room");
    let put = |key: &str, value: &str| {
        let mut batch = Batch::new();
        batch.put(key.to_owned(), value.to_owned());
        apply(batch);
    };
    // More than a clone copies.
    let mut batch = Batch::new();
    for number in 0..1000u32 {
        batch.put(format!("head{number}"), vec![1; 100]);
    }
    apply(batch);
    tree.checkpoint().expect("there is room");
    let mut copies = 0;
    // Clones the head, and edits the copy; returns whether nodes were visited for the head.
    let mut looks = |expected: &str| {
        copies += 1;
        let copy = format!("copy{copies}/");
        let before = tree.stats().counts.node_visits;
        let mut batch = Batch::new();
        batch.clone_prefix("head", copy.clone());
        apply(batch);
        let visits = tree.stats().counts.node_visits - before;
        let get = |key: String| tree.get(key.as_bytes()).expect("reads");
        assert_eq!(
            get(format!("{copy}7")).as_deref(),
            Some(expected.as_bytes())
        );
        put(&format!("{copy}7"), "edited");
        let seen = tree.scan(
            copy.as_bytes(),
            successor_of_prefix(copy.as_bytes()).as_deref(),
        );
        assert_eq!(seen.count(), 1000);
        visits > 0
    };
    put("head7", "first");
    assert!(looks("first"), "an edit waits in memory");
    assert!(looks("first"), "an edit still waits");
    tree.checkpoint().expect("there is room");
    assert!(looks("first"), "under a new root");
    assert!(!looks("first"), "known");
    assert!(!looks("first"), "still known");
    put("head7", "second");
    assert!(looks("second"), "an edit waits again");
    tree.checkpoint().expect("there is room");
    assert!(looks("second"), "the edit is below");
    assert!(!looks("second"), "known again");
    put("head7", "third");
    let mut batch = Batch::new();
    for number in 0..MEMORY_BYTES / 1000 {
        batch.put(format!("z{number}"), vec![3; 1000]);
    }
    apply(batch);
    assert!(looks("third"), "the edit is in a segment of a new root");
    let mut batch = Batch::new();
    batch.delete_prefix("head");
    batch.delete_prefix("copy");
    batch.delete_prefix("z");
    apply(batch);
    for _ in 0..3 {
        tree.checkpoint().expect("there is room");
    }
    assert_eq!(tree.stats().zombies, 0, "unused nodes are kept");
    assert!(tree.verify(&mut |_| {}).expect("reads").is_empty());
}

#[test]
fn the_queue_of_the_journal_counts_as_memory_until_it_is_written() {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
    Tree::format(&dev, &FormatOptions::default()).expect("there is room");
    let budget = Budget::of_volumes(64 << 20);
    let options = OpenOptions {
        budget: Some(Arc::clone(&budget)),
        ..OpenOptions::default()
    };
    let tree = Tree::open(dev, options).expect("there is room");
    for key in ["a", "b"] {
        let mut batch = Batch::new();
        batch.put(key, vec![7; 100_000]);
        tree.apply(batch).expect("there is room");
    }
    tree.sync().expect("there is room");
    // The second batch was let in while the first one waited.
    budget.set(Use::Journal, 100_000);
    tree.rebalance_memory();
    assert_eq!(budget.used(Use::Journal), 0);
    tree.close().expect("there is room");
}

/// A tree of 4,000 keys below `a`, opened anew, so that no node is in memory.
fn cold_tree() -> Tree {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
    Tree::format(&dev, &FormatOptions::default()).expect("formats");
    let options = || OpenOptions {
        manual: true,
        ..OpenOptions::default()
    };
    let tree = Tree::open(dev.clone(), options()).expect("opens");
    put_many(&tree, "a", 4000);
    tree.close().expect("there is room");
    drop(tree);
    Tree::open(dev, options()).expect("opens")
}

fn put_many(tree: &Tree, prefix: &str, count: u32) {
    for part in 0..count.div_ceil(1000) {
        let mut batch = Batch::new();
        for number in part * 1000..count.min((part + 1) * 1000) {
            batch.put(format!("{prefix}{number:05}"), vec![1; 100]);
        }
        tree.apply(batch).expect("there is room");
    }
}

fn clone_of(source: &str, copy: &str) -> Batch {
    let mut batch = Batch::new();
    batch.clone_prefix(source.to_owned(), copy.to_owned());
    batch
}

#[test]
fn a_clone_under_locks_reads_no_node_and_is_made_after_they_were_read() {
    let tree = cold_tree();
    let before = tree.stats();
    let deferred = match Applied::try_on(&tree, clone_of("a", "b"), 0).expect("writes") {
        Applied::Deferred(work) => work,
        Applied::Done(_) => panic!("no node was in memory"),
    };
    let after = tree.stats();
    assert_eq!(
        (after.counts.node_reads, after.seq),
        (before.counts.node_reads, before.seq)
    );
    assert_eq!(tree.scan(b"b", None).count(), 0);
    deferred.finish(&tree).expect("reads");
    let read = tree.stats().counts.node_reads;
    assert!(read > before.counts.node_reads);
    let applied = Applied::try_on(&tree, clone_of("a", "b"), 1).expect("writes");
    assert!(matches!(applied, Applied::Done(_)), "{applied:?}");
    assert_eq!(tree.stats().counts.node_reads, read);
    assert_eq!(tree.scan(b"b", None).count(), 4000);
}

#[test]
fn a_clone_under_locks_waits_for_no_flush_of_its_source() {
    let tree = cold_tree();
    let work = || {
        let (stats, paths) = (tree.stats(), tree.stats().paths);
        let flushes = [
            StructuralPath::CloneWaits,
            StructuralPath::Rewrites,
            StructuralPath::Flushes,
        ];
        (stats.counts.node_reads, flushes.map(|path| paths[path]))
    };
    let mut deferred = 0;
    for round in 0.. {
        // The writer is as fast as the work for the clone, and so many messages wait again.
        put_many(&tree, "a", 30_000);
        let before = work();
        let applied = Applied::try_on(&tree, clone_of("a", "b"), round).expect("writes");
        assert_eq!(work(), before, "round {round}");
        match applied {
            Applied::Done(_) => break,
            Applied::Deferred(work) => work.finish(&tree).expect("reads"),
        }
        deferred += 1;
        assert!(round < 7, "the clone never comes to its end");
    }
    assert!(deferred > 0, "the messages of the source come first");
    assert_eq!(tree.scan(b"b", None).count(), 30_000);
    assert!(tree.verify(&mut |_| {}).expect("reads").is_empty());
}

/// Longest time that a test waits for a batch.
const APPLIES_WITHIN: Duration = Duration::from_secs(60);

#[test]
fn a_clone_of_many_messages_of_its_own_batch_is_made_under_locks() {
    // More than one clone copies before the memory buffer is frozen.
    let batch = || {
        let mut batch = Batch::new();
        for number in 0..40u32 {
            batch.put(format!("new{number:02}"), vec![number as u8; 60_000]);
        }
        batch.clone_prefix("new", "copy");
        batch.put("new00", "changed");
        batch
    };
    for round in 0..10 {
        let tree = Arc::new(cold_tree());
        put_many(&tree, "b", 100);
        let (tell, told) = mpsc::channel();
        let thread = std::thread::spawn({
            let (tree, batch) = (Arc::clone(&tree), batch());
            move || drop(tell.send(Applied::try_on(&tree, batch, round)))
        });
        let applied = told.recv_timeout(APPLIES_WITHIN);
        let applied = applied.unwrap_or_else(|_| panic!("round {round} does not end"));
        thread.join().expect("it has ended");
        match applied.expect("there is room") {
            Applied::Done(_) => {}
            Applied::Deferred(work) => {
                assert_eq!(round, 0, "{work:?}");
                work.finish(&tree).expect("there is room");
                continue;
            }
        }
        assert_eq!(tree.scan(b"copy", Some(b"copz")).count(), 40);
        let first = [b"copy00", &b"new00"[..]].map(|key| tree.get(key).expect("reads"));
        assert_eq!(first[0].as_deref(), Some(&[0; 60_000][..]));
        assert_eq!(first[1].as_deref(), Some(&b"changed"[..]));
        assert!(tree.verify(&mut |_| {}).expect("reads").is_empty());
    }
}

#[test]
fn a_range_message_over_a_full_buffer_freezes_it_and_hides_all_that_it_replaces() {
    let tree = cold_tree();
    put_many(&tree, "c", 100);
    let mut batch = Batch::new();
    batch.delete_prefix("c");
    tree.apply(batch).expect("there is room");
    let few = tree.stats().pending_message_bytes;
    put_many(&tree, "b", 20_000);
    let full = tree.stats().pending_message_bytes;
    let mut batch = Batch::new();
    batch.delete_prefix("b");
    batch.put("b00007", "new");
    tree.apply(batch).expect("there is room");
    let after = tree.stats();
    // The messages that were replaced are in a segment of the root, and were not taken out.
    assert!(few < full / 100 && after.pending_message_bytes > full / 2);
    assert!(after.buffered_ranges == 1, "{}", after.buffered_ranges);
    let left: Vec<_> = tree
        .scan(b"b", None)
        .map(|item| item.expect("reads").0)
        .collect();
    assert_eq!(left, ["b00007"]);
    tree.checkpoint().expect("there is room");
    assert!(tree.verify(&mut |_| {}).expect("reads").is_empty());
    let left = tree.scan(b"b", None).count();
    assert_eq!((left, tree.scan(b"a", None).count()), (1, 4001));
}

/// A device whose syncs take longer than four ticks of any kernel.
#[derive(Debug)]
struct SlowSyncs(MemDevice);

impl Device for SlowSyncs {
    fn len_bytes(&self) -> u64 {
        self.0.len_bytes()
    }
    fn read_at(&self, addr: u64, buf: &mut [u8]) -> std::io::Result<()> {
        self.0.read_at(addr, buf)
    }
    fn write_at(&self, addr: u64, buf: &[u8]) -> std::io::Result<()> {
        self.0.write_at(addr, buf)
    }
    fn sync(&self) -> std::io::Result<()> {
        std::thread::sleep(std::time::Duration::from_millis(50));
        self.0.sync()
    }
    fn discard(&self, addr: u64, len_bytes: u64) -> std::io::Result<()> {
        self.0.discard(addr, len_bytes)
    }
}

#[test]
fn the_longest_holds_of_the_locks_are_told() {
    let device: Arc<dyn Device> = Arc::new(SlowSyncs(MemDevice::new(64 << 20)));
    Tree::format(&device, &FormatOptions::default()).expect("formats");
    let options = OpenOptions {
        manual: true,
        ..OpenOptions::default()
    };
    let tree = Tree::open(device, options).expect("opens");
    put_many(&tree, "a", 100);
    tree.checkpoint().expect("there is room");
    let locks = tree.stats().locks;
    let held = |name| locks.iter().find(|lock| lock.0 == name).expect("a lock").1;
    let [checkpoint, structure, state] = ["checkpoint", "structure", "state"].map(held);
    // A checkpoint holds its lock over a sync, and the others over none.
    assert!(checkpoint.hold_ns >= 30_000_000, "{checkpoint:?}");
    assert!(checkpoint.hold_ns > structure.hold_ns.max(state.hold_ns));
    assert_eq!(checkpoint.wait_ns, 0, "there was one thread");
}
