//! The tree against a map in which a clone is a copy of the range.
//!
//! `RAMET_SEED` sets the first seed, `RAMET_SEEDS` their number, `RAMET_OPS` the steps of each. A
//! failure prints a short history that fails.

use std::time::Duration;

use bytes::Bytes;
use ramet_betree::PathCounts;
use ramet_sim::{Change, Fill, Mix, Setup, Step, env_u64, run_random, run_steps};

#[test]
fn random_histories_equal_the_model() {
    let first = env_u64("RAMET_SEED", 1);
    let ops = usize::try_from(env_u64("RAMET_OPS", 10_000)).expect("fits");
    let mut paths = PathCounts::default();
    for seed in first..first + env_u64("RAMET_SEEDS", 6) {
        let setup = Setup::tiny_nodes_of(seed);
        println!("RAMET_SEED={seed} RAMET_OPS={ops} {:?}", setup.open.shape);
        match run_random(&setup, seed, ops, 1500, Mix::Dense, Duration::from_secs(60)) {
            Ok(report) => {
                println!("{report:?}");
                paths += report.paths;
            }
            Err(text) => panic!("{text}"),
        }
    }
    for (name, count) in paths.by_name() {
        println!("{name:>16} {count}");
    }
    let unseen = paths
        .by_name()
        .map(|(name, count)| (count == 0).then_some(name));
    let unseen: Vec<&str> = unseen.into_iter().flatten().collect();
    assert!(unseen.is_empty(), "paths never taken: {unseen:?}");
}

fn key(text: &'static [u8]) -> Bytes {
    Bytes::from_static(text)
}

fn put(text: &'static [u8], salt: u32) -> Change {
    Change::Put {
        key: key(text),
        value: Fill { len: 40, salt },
    }
}

/// Runs the changes as one batch, as one batch each, and with a checkpoint and a reopen after each:
/// clones of ranges in memory, and of ranges on the device.
fn check(changes: &[Change]) {
    let single = |extra: &[Step]| {
        let with_extra = |change: &Change| [&[Step::Apply(vec![change.clone()])], extra].concat();
        changes.iter().flat_map(with_extra).collect::<Vec<Step>>()
    };
    let histories = [
        vec![Step::Apply(changes.to_vec()), Step::ScanAll, Step::Reopen],
        single(&[Step::ScanAll]),
        single(&[Step::Checkpoint, Step::ScanAll]),
        single(&[Step::Sync, Step::Crash, Step::ScanAll]),
        single(&[Step::Reopen]),
    ];
    for steps in histories {
        if let Err(failure) = run_steps(&Setup::tiny_nodes(), &steps) {
            panic!("step {} of {steps:#?}: {}", failure.step, failure.detail);
        }
    }
}

fn some_keys() -> Vec<Change> {
    vec![
        put(b"", 1),
        put(b"\x00", 2),
        put(b"a", 3),
        put(b"a\x00", 4),
        put(b"a\x00b", 5),
        put(b"ab", 6),
        put(b"abb", 7),
        put(b"a\xff", 8),
        put(b"a\xff\xff", 9),
        put(b"b", 10),
        put(b"\xff", 11),
        put(b"\xff\xff", 12),
        put(b"\xff\xffa", 13),
    ]
}

fn check_after_some_keys(changes: &[Change]) {
    check(
        &[
            some_keys(),
            changes.to_vec(),
            vec![put(b"ab", 99)],
            changes.to_vec(),
        ]
        .concat(),
    );
}

#[test]
fn a_clone_goes_into_its_own_source() {
    check_after_some_keys(&[Change::ClonePrefix {
        src: key(b"a"),
        dst: key(b"ab"),
    }]);
    check_after_some_keys(&[Change::ClonePrefix {
        src: key(b"a"),
        dst: key(b"a\x00c"),
    }]);
}

#[test]
fn a_clone_replaces_a_range_that_holds_its_source() {
    check_after_some_keys(&[Change::ClonePrefix {
        src: key(b"ab"),
        dst: key(b"a"),
    }]);
    check_after_some_keys(&[Change::ClonePrefix {
        src: key(b"a"),
        dst: key(b""),
    }]);
}

#[test]
fn a_clone_onto_itself_changes_nothing() {
    check_after_some_keys(&[Change::ClonePrefix {
        src: key(b"a"),
        dst: key(b"a"),
    }]);
    check_after_some_keys(&[Change::ClonePrefix {
        src: key(b""),
        dst: key(b""),
    }]);
}

#[test]
fn the_whole_key_space_is_cloned_below_a_key_of_itself() {
    check_after_some_keys(&[Change::ClonePrefix {
        src: key(b""),
        dst: key(b"a"),
    }]);
    check_after_some_keys(&[Change::ClonePrefix {
        src: key(b""),
        dst: key(b"\xff\xff"),
    }]);
}

#[test]
fn prefixes_without_a_successor_are_cloned_both_ways() {
    check_after_some_keys(&[Change::ClonePrefix {
        src: key(b"\xff\xff"),
        dst: key(b"c"),
    }]);
    check_after_some_keys(&[Change::ClonePrefix {
        src: key(b"a"),
        dst: key(b"\xff"),
    }]);
    check_after_some_keys(&[Change::ClonePrefix {
        src: key(b"\xff"),
        dst: key(b"\xff\xff"),
    }]);
}

#[test]
fn part_of_a_prefix_is_cloned_over_an_overlapping_part() {
    for prefix in [&b"a"[..], b"", b"aa", b"\xff"] {
        check_after_some_keys(&[Change::CloneRange {
            lo: key(b"a\x00"),
            hi: Some(key(b"abb")),
            strip: 1,
            prefix: Bytes::copy_from_slice(prefix),
        }]);
    }
    check_after_some_keys(&[Change::CloneRange {
        lo: key(b"a"),
        hi: None,
        strip: 0,
        prefix: key(b"a"),
    }]);
}

#[test]
fn a_clone_of_an_empty_range_empties_its_destination() {
    check_after_some_keys(&[Change::ClonePrefix {
        src: key(b"nothing"),
        dst: key(b"a"),
    }]);
    check_after_some_keys(&[Change::CloneRange {
        lo: key(b"ab"),
        hi: Some(key(b"ab")),
        strip: 1,
        prefix: key(b"a"),
    }]);
}

#[test]
fn patches_pass_through_clones() {
    let patch = |text: &'static [u8], offset, salt| Change::Patch {
        key: key(text),
        offset,
        bytes: Fill { len: 7, salt },
    };
    check(&[
        put(b"s/1", 1),
        patch(b"s/1", 3, 2),
        Change::ClonePrefix {
            src: key(b"s/"),
            dst: key(b"d/"),
        },
        patch(b"d/1", 38, 3),
        patch(b"s/1", 60, 4),
        patch(b"d/2", 5, 5),
        Change::ClonePrefix {
            src: key(b"d/"),
            dst: key(b"e/"),
        },
        Change::Delete { key: key(b"d/1") },
        patch(b"d/1", 2, 6),
        Change::DeletePrefix { prefix: key(b"s/") },
        patch(b"s/1", 0, 7),
        patch(b"e/1", 0, 8),
    ]);
}
