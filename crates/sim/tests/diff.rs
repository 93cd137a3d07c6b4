//! Differences of ranges against the model, and their costs.
//!
//! `RAMET_SEED` sets the first seed, `RAMET_SEEDS` their number, `RAMET_OPS` the batches of each.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{
    Batch, Difference, FormatOptions, OpenOptions, Snapshot, Span, Tree, successor_of_prefix,
};
use ramet_block::Device;
use ramet_sim::{Change, Generator, Mix, Model, Rng, Runner, Setup, SparseDevice, Step, env_u64};

/// A range and how much of its keys is not told.
#[derive(Clone, Debug)]
struct Part {
    lo: Bytes,
    hi: Option<Bytes>,
    strip: usize,
}

impl Part {
    fn prefix(prefix: &Bytes) -> Self {
        Self {
            lo: prefix.clone(),
            hi: successor_of_prefix(prefix),
            strip: prefix.len(),
        }
    }

    fn span(&self) -> Span {
        Span::range(self.lo.clone(), self.hi.clone(), self.strip).unwrap()
    }

    fn told(&self, model: &Model) -> BTreeMap<Bytes, Bytes> {
        let keys = model.range(&self.lo, self.hi.as_deref());
        keys.map(|(key, value)| (key.slice(self.strip..), value.clone()))
            .collect()
    }
}

/// Every key of both, compared.
fn naive(a: &BTreeMap<Bytes, Bytes>, b: &BTreeMap<Bytes, Bytes>) -> Vec<Difference> {
    let mut keys: Vec<&Bytes> = a.keys().chain(b.keys()).collect();
    keys.sort();
    keys.dedup();
    let differing = keys.into_iter().filter(|key| a.get(*key) != b.get(*key));
    differing
        .map(|key| Difference {
            key: key.clone(),
            before: a.get(key).cloned(),
            after: b.get(key).cloned(),
        })
        .collect()
}

fn check(
    old: &(Snapshot, Model),
    new: &(Snapshot, Model),
    a: &Part,
    b: &Part,
    rng: &mut Rng,
) -> usize {
    let expected = naive(&a.told(&old.1), &b.told(&new.1));
    let found = old.0.diff_range(&a.span(), &new.0, &b.span()).unwrap();
    let found: Vec<Difference> = found.map(|d| d.expect("no I/O fails here")).collect();
    assert_eq!(found, expected, "{a:?} {b:?}");

    // The same with leaps now and then, backwards ones included, which do nothing.
    let mut diff = old.0.diff_range(&a.span(), &new.0, &b.span()).unwrap();
    let mut rest = &expected[..];
    loop {
        if rng.one_in(3) && !expected.is_empty() {
            let to = &expected[rng.below(expected.len())].key;
            diff.skip_to(to);
            rest = &rest[rest.partition_point(|d| d.key < *to)..];
        }
        let next = diff.next().transpose().unwrap();
        assert_eq!(next.as_ref(), rest.first(), "after a leap in {a:?} {b:?}");
        let Some((_, others)) = rest.split_first() else {
            break;
        };
        rest = others;
    }
    expected.len()
}

/// Ranges worth comparing: sources and copies of clones, prefixes of keys that exist, any range.
fn parts(rng: &mut Rng, model: &Model, clones: &[(Part, Part)]) -> (Part, Part) {
    if !clones.is_empty() && !rng.one_in(4) {
        let (a, b) = clones[rng.below(clones.len())].clone();
        return if rng.one_in(2) { (a, b) } else { (b, a) };
    }
    let mut any = || {
        let near: Vec<u8> = (0..3)
            .map(|_| [0u8, 1, b'a', b'b', 0xff][rng.below(5)])
            .collect();
        let key = model.key_near(&near).cloned().unwrap_or_default();
        Part::prefix(&key.slice(..rng.below(key.len().min(4) + 1)))
    };
    (any(), any())
}

fn cloned(change: &Change) -> Option<(Part, Part)> {
    let (strip, prefix) = change.translation()?;
    let ((lo, hi), (there, end)) = (change.source()?, change.replaced()?);
    let source = Part { lo, hi, strip };
    let copy = Part {
        lo: there,
        hi: end,
        strip: prefix.len(),
    };
    Some((source, copy))
}

#[test]
fn differences_equal_those_of_the_model() {
    let first = env_u64("RAMET_SEED", 1);
    let ops = env_u64("RAMET_OPS", 1200);
    for seed in first..first + env_u64("RAMET_SEEDS", 3) {
        println!("RAMET_SEED={seed} RAMET_OPS={ops}");
        let mut runner = Runner::new(Setup::tiny_nodes_of(seed)).unwrap();
        let mut generator = Generator::new(seed, 600, Mix::Dense);
        let mut rng = Rng::new(seed ^ 0x6469_6666);
        let mut clones: Vec<(Part, Part)> = Vec::new();
        let mut old: Option<(Snapshot, Model)> = None;
        let (mut compared, mut differing) = (0, 0);
        for op in 0..ops {
            let changes = generator.changes(runner.model());
            clones.extend(changes.iter().filter_map(cloned));
            clones.drain(..clones.len().saturating_sub(12));
            runner.step(&Step::Apply(changes)).unwrap();
            if rng.one_in(25) {
                runner.step(&Step::Checkpoint).unwrap();
            }
            if op % 3 != 0 {
                continue;
            }
            let now = || (runner.tree().snapshot(), runner.model().clone());
            let (a, b) = parts(&mut rng, runner.model(), &clones);
            differing += check(&now(), &now(), &a, &b, &mut rng);
            compared += 1;
            if let Some(then) = &old {
                let whole = Part::prefix(&Bytes::new());
                differing += check(then, &now(), &whole, &whole, &mut rng);
                differing += check(then, &now(), &a, &b, &mut rng);
                compared += 2;
            }
            if rng.one_in(20) {
                old = Some(now());
            }
        }
        println!(
            "{compared} compared, {differing} differences, {:?}",
            runner.report().paths
        );
        assert!(differing > compared, "the ranges hardly ever differ");
    }
}

const KEYS: u32 = 100_000;

fn key(table: &str, n: u32) -> Bytes {
    format!("{table}/{:08}", n.wrapping_mul(2_654_435_761) % 100_000_000).into()
}

/// A table of 100,000 keys with a clone, on the device.
fn two_tables() -> Arc<dyn Device> {
    let device: Arc<dyn Device> = Arc::new(SparseDevice::new(1 << 30));
    Tree::format(&device, &FormatOptions::default()).unwrap();
    let tree = Tree::open(device.clone(), OpenOptions::default()).unwrap();
    for chunk in 0..KEYS / 1000 {
        let mut batch = Batch::new();
        for n in chunk * 1000..(chunk + 1) * 1000 {
            batch.put(key("a", n), vec![n as u8; 100]);
        }
        tree.apply(batch).unwrap();
    }
    let mut batch = Batch::new();
    batch.clone_prefix("a/", "b/");
    tree.apply(batch).unwrap();
    tree.close().unwrap();
    device
}

/// Node reads of `work` on a tree that was just opened.
fn reads_of(device: &Arc<dyn Device>, work: impl FnOnce(&Tree)) -> u64 {
    let options = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    let tree = Tree::open(device.clone(), options).unwrap();
    let before = tree.stats().counts.node_reads;
    work(&tree);
    tree.stats().counts.node_reads - before
}

#[test]
fn a_diff_costs_by_the_differences() {
    let device = two_tables();
    let changed: Vec<Bytes> = (0..10).map(|n| key("b", n * 9973)).collect();
    // Once while the changes wait in the tree, and once more after rounds of other changes.
    for round in 0..2 {
        let tree = Tree::open(device.clone(), OpenOptions::default()).unwrap();
        for key in &changed {
            let mut batch = Batch::new();
            batch.put(key.clone(), format!("changed {round}"));
            tree.apply(batch).unwrap();
        }
        if round == 1 {
            for n in 0..60_000u32 {
                let mut batch = Batch::new();
                batch.put(key("c", n), vec![1; 1000]);
                tree.apply(batch).unwrap();
            }
        }
        tree.close().unwrap();
        let lookups = reads_of(&device, |tree| {
            // Of the clone's source: the new values alone are found high up in the tree.
            for key in &changed {
                let key = [b"a/", &key[2..]].concat();
                assert!(tree.get(&key).unwrap().is_some());
            }
        });
        let diff = reads_of(&device, |tree| {
            let diff = tree.diff_range(&Span::prefix("a/"), &Span::prefix("b/"));
            let mut found: Vec<Bytes> = diff
                .map(|d| [b"b/", &d.unwrap().key[..]].concat().into())
                .collect();
            let mut expected = changed.clone();
            expected.sort();
            found.sort();
            assert_eq!(found, expected);
        });
        println!("round {round}: {lookups} node reads for 10 lookups, {diff} for the diff");
        assert!(
            diff <= 5 * lookups,
            "{diff} node reads, {lookups} of 10 lookups"
        );
    }
}

#[test]
fn views_of_two_trees_are_not_compared() {
    let (one, two) = (two_tables(), two_tables());
    let open = |device| Tree::open(device, OpenOptions::default()).unwrap();
    let (one, two) = (open(one), open(two));
    let span = Span::prefix("a/");
    assert!(
        one.snapshot()
            .diff_range(&span, &two.snapshot(), &span)
            .is_err()
    );
    assert!(Span::range("ab", Some(Bytes::from("c")), 1).is_err());
}
