//! The experiments of `ramet_sim::scale`, small, judged by their counts.

use ramet_betree::TreeShape;
use ramet_sim::env_u64;
use ramet_sim::scale::{Edited, Many, Ranges, Rounds};

/// So small that some hundred rounds rewrite leaves, split nodes and merge segments.
fn small_shape() -> TreeShape {
    TreeShape {
        leaf_bytes: 128 << 10,
        block_bytes: 8 << 10,
        fanout: 16,
        buffer_bytes: 256 << 10,
        memory_bytes: 256 << 10,
        ..TreeShape::default()
    }
}

fn rounds(edited: Edited) {
    let experiment = Rounds {
        edited,
        files: 16,
        blocks: 128,
        edit_bytes: 16,
        rounds: 1000,
        samples: vec![100, 300, 1000],
        checkpoint_every: 50,
        repetitions: 2,
        turns: 2,
        shape: Some(small_shape()),
        cache_bytes: 64 << 20,
    };
    let (samples, turns) = experiment.run(|sample| println!("{edited:?} {sample:?}"));
    let (first, last) = (&samples[0], &samples[samples.len() - 1]);
    assert!(
        last.clone_visits <= first.clone_visits * 2 + 8,
        "a clone goes through {} nodes, and {} at first",
        last.clone_visits,
        first.clone_visits
    );
    // A node takes many more clones after it was put in order, however slow the background is.
    assert!(
        last.clone_waits <= u64::from(last.round) / 10,
        "{} clones waited for a node",
        last.clone_waits
    );
    assert!(
        last.round_bytes <= 24.0 * 1024.0,
        "{} bytes a round",
        last.round_bytes
    );
    // The merged bytes grow with the logarithm of the rounds, beside a segment and a skeleton of a
    // block each.
    assert!(
        last.round_bytes <= first.round_bytes * 1.25,
        "{} bytes a round, and {} at first",
        last.round_bytes,
        first.round_bytes
    );
    let allowed = 4 * last.message_bytes + 16 * 1024 * u64::from(last.round);
    assert!(
        last.grown_bytes <= allowed,
        "{} bytes in all",
        last.grown_bytes
    );
    assert!(
        last.scan_bytes as f64 <= first.scan_bytes as f64 * 1.25,
        "a scan reads {} bytes, and {} at first",
        last.scan_bytes,
        first.scan_bytes
    );
    // Both are opened anew, and clone by turns.
    for [early, late] in &turns {
        println!("{edited:?} {early:?} {late:?}");
        assert_eq!((early.round, late.round), (first.round, last.round));
        // A level more of the tree is a node more on the way to a head that stays as it is.
        let levels = last.height.saturating_sub(first.height) as f64;
        assert!(
            late.clone_visits <= early.clone_visits + levels + 0.5,
            "by turns, a clone goes through {} nodes, and {} after {} rounds",
            late.clone_visits,
            early.clone_visits,
            early.round
        );
    }
    assert_eq!(turns.len(), 2);
}

#[test]
fn copies_of_a_head_cost_the_same_in_every_round() {
    rounds(Edited::HeadTail);
}

#[test]
fn snapshots_of_a_head_cost_the_same_in_every_round() {
    rounds(Edited::HeadHead);
}

#[test]
fn a_chain_of_clones_costs_the_same_in_every_round() {
    rounds(Edited::TailTail);
}

/// Until there are many clones of a tree, all of it is edges of the root.
#[test]
fn clones_of_a_range_that_several_edges_show_make_no_levels() {
    for edited in [Edited::HeadHead, Edited::TailTail] {
        let experiment = Rounds {
            edited,
            files: 64,
            blocks: 128,
            edit_bytes: 16,
            rounds: 50,
            samples: vec![50],
            checkpoint_every: 10,
            repetitions: 0,
            turns: 0,
            shape: Some(TreeShape {
                leaf_bytes: 64 << 10,
                ..TreeShape::default()
            }),
            cache_bytes: 64 << 20,
        };
        let (samples, _) = experiment.run(|sample| println!("{edited:?} {sample:?}"));
        // Leaves, the nodes over them, the part of these that the clones share, and the root.
        assert!(samples[0].height <= 3, "{edited:?}: {}", samples[0].height);
    }
}

#[test]
fn thousands_of_clones_cost_no_more_than_ten_and_leave_nothing() {
    let experiment = Many {
        clones: 5000,
        keys: 2000,
        checkpoint_every: 250,
        shape: None,
        cache_bytes: 64 << 20,
        seed: env_u64("RAMET_SEED", 1),
    };
    println!("RAMET_SEED={}", experiment.seed);
    let (samples, deletion) = experiment.run(|sample| println!("{sample:?}"));
    let (first, last) = (&samples[0], &samples[samples.len() - 1]);
    assert!(last.clone_visits <= first.clone_visits + 8);
    assert!(last.get_visits <= first.get_visits + 3.0);
    assert!(last.scan_reads <= first.scan_reads + 8);
    assert!(
        last.clone_bytes <= 1024.0,
        "{} bytes a clone",
        last.clone_bytes
    );
    println!("{deletion:?}");
    assert!(
        deletion.reads <= 0.1,
        "deletion reads {} nodes a clone",
        deletion.reads
    );
    assert!(deletion.reclaimed <= 3.0);
    assert!(
        deletion.end_bytes <= deletion.start_bytes + (64 << 10),
        "{} bytes before, {} after",
        deletion.start_bytes,
        deletion.end_bytes
    );
}

#[test]
fn deleting_a_clone_costs_by_its_private_nodes() {
    let experiment = Many {
        clones: 0,
        keys: 4000,
        checkpoint_every: 1,
        shape: None,
        cache_bytes: 64 << 20,
        seed: env_u64("RAMET_SEED", 1),
    };
    println!("RAMET_SEED={}", experiment.seed);
    let parts = experiment.private_parts(&[0, 10, 1000], 5);
    for part in &parts {
        println!("{part:?}");
        assert!(part.reads <= 4.0, "what goes is not read");
        assert!(part.freed_bytes >= 0.9 * part.private_bytes - 8192.0);
        let nodes_max = 3.0 + part.private_bytes / 16384.0;
        assert!(part.reclaimed <= 8.0 + nodes_max);
        assert!(part.written_bytes <= 64.0 * 1024.0);
    }
    assert!(parts[2].private_bytes > 20.0 * parts[1].private_bytes);
}

#[test]
fn ten_thousand_range_messages_in_one_buffer_hardly_slow_lookups() {
    let experiment = Ranges {
        ranges: 10_000,
        probes: 2000,
        seed: env_u64("RAMET_SEED", 1),
    };
    println!("RAMET_SEED={}", experiment.seed);
    let report = experiment.run();
    println!("{report:?}");
    assert_eq!(report.live, 10_000, "none touches another");
    assert!(report.in_memory.visits <= report.without.visits * 2.0);
    assert!(report.in_node.visits <= report.without.visits * 2.0);
    assert!(report.in_node.reads <= report.without.reads * 2.0 + 0.1);
    assert_eq!(report.coalesced, 1, "neighbours become one");
    assert!(report.leaves > 10 && report.pruned + 2 >= report.leaves);
    assert!(report.reads <= 4, "leaves are dropped unread");
}
