//! A volume that is cloned into itself every day. Each day shows twice as many files as the day
//! before, so nothing may depend on their number: neither the clone of the day, nor a lookup at the
//! top, nor the walks over the volume.
//!
//! `RAMET_DAYS` says how many days pass (300), see `./soak days`.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{make, variable};
use ramet_block::{Device, MemDevice};
use ramet_fs::{Caller, CloneMode, FormatOptions, Kind, OpenOptions, ROOT_INO, Volume};

const FILES: usize = 1000;
const FILE_BYTES: usize = 1500;
/// Days over which costs are averaged: segments gather for some days until they are merged.
const WINDOW: usize = 10;
/// Longest time of a day, or of one walk over the volume.
const WITHIN: Duration = Duration::from_secs(120);

fn content(number: usize) -> Vec<u8> {
    let mut state = number as u64 * 2 + 1;
    (0..FILE_BYTES)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as u8
        })
        .collect()
}

fn open(device: &Arc<dyn Device>) -> Arc<Volume> {
    let options = OpenOptions {
        manual: true,
        ..OpenOptions::default()
    };
    Volume::open(Arc::clone(device), options).unwrap()
}

/// A volume with files at the top.
fn volume(bytes: u64) -> (Arc<dyn Device>, Arc<Volume>) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(bytes));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let volume = open(&device);
    for number in 0..FILES {
        let file = make(&volume, ROOT_INO, &format!("f{number:04}"), Kind::Regular);
        volume
            .files()
            .write(file.ino, 0, &content(number), None)
            .unwrap();
    }
    volume.forget_all();
    volume.checkpoint().unwrap();
    (device, volume)
}

fn name(day: usize) -> String {
    format!("day{day}")
}

/// The cost of one day.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    clone_visits: u64,
    lookup_visits: u64,
    /// Bytes of the day and its checkpoint.
    written: u64,
}

fn visits(volume: &Volume) -> u64 {
    volume.tree().stats().counts.node_visits
}

/// Looks some files at the top up, and returns the nodes visited for all.
fn look(volume: &Volume) -> u64 {
    let before = visits(volume);
    for number in (0..FILES).step_by(97) {
        let name = format!("f{number:04}");
        let file = volume.names().lookup(ROOT_INO, name.as_bytes()).unwrap();
        let found = volume.files().read(file.ino, 0, FILE_BYTES as u32).unwrap();
        assert_eq!(found, content(number));
    }
    let visits = visits(volume) - before;
    volume.forget_all();
    visits
}

/// Clones the volume into itself, and removes the day that is `kept` days old.
fn pass(volume: &Volume, day: usize, kept: usize) -> Cost {
    let begun = Instant::now();
    let new = name(day);
    let before = volume.tree().stats().counts;
    let caller = Caller::root();
    let trees = volume.trees();
    let made = trees.clone_entry(&caller, ROOT_INO, ROOT_INO, new.as_bytes(), CloneMode::New);
    made.unwrap_or_else(|error| panic!("day {day}: {error}"));
    let clone_visits = visits(volume) - before.node_visits;
    if day > kept {
        let old = name(day - kept);
        trees
            .remove_tree(&caller, ROOT_INO, old.as_bytes())
            .unwrap();
    }
    volume.forget_all();
    volume.checkpoint().unwrap();
    let after = volume.tree().stats();
    let cost = Cost {
        clone_visits,
        lookup_visits: look(volume),
        written: after.counts.bytes_written - before.bytes_written,
    };
    assert!(begun.elapsed() < WITHIN, "day {day}: {:?}", begun.elapsed());
    cost
}

/// The medians and means of the days that end with `day`.
fn typical(costs: &[Cost], day: usize) -> ([u64; 3], [u64; 3]) {
    let days = &costs[day - WINDOW..day];
    let kinds: [fn(&Cost) -> u64; 3] = [
        |cost| cost.clone_visits,
        |cost| cost.lookup_visits,
        |cost| cost.written,
    ];
    let sorted = kinds.map(|kind| {
        let mut all: Vec<u64> = days.iter().map(kind).collect();
        all.sort_unstable();
        all
    });
    let means = sorted
        .each_ref()
        .map(|all| all.iter().sum::<u64>() / all.len() as u64);
    (sorted.map(|all| all[WINDOW / 2]), means)
}

fn timed<T>(what: &str, volume: &Volume, run: impl FnOnce() -> T) -> T {
    let (begun, before) = (Instant::now(), visits(volume));
    let done = run();
    let visited = visits(volume) - before;
    println!("  {what}: {visited} visits, {:?}", begun.elapsed());
    assert!(begun.elapsed() < WITHIN, "{what}: {:?}", begun.elapsed());
    done
}

fn days_pass(kept: usize) {
    let days = variable("RAMET_DAYS").map_or(300, |days| days as usize);
    let (device, volume) = volume((256 << 20) + days as u64 * (256 << 10));
    let mut costs = Vec::new();
    for day in 1..=days {
        costs.push(pass(&volume, day, kept));
        if day == 10 || day.is_power_of_two() || day == days {
            let nodes = volume.tree().stats().nodes;
            println!("  day {day}: {:?}, {nodes} nodes", costs[day - 1]);
        }
    }
    let ((first, first_means), (last, last_means)) =
        (typical(&costs, 10 + WINDOW / 2), typical(&costs, days));
    println!("{days} days, {kept} kept; clone, lookups, bytes:");
    println!("  medians {first:?} about day 10, {last:?} at the end");
    println!("  means {first_means:?} about day 10, {last_means:?} at the end");
    for (at, what) in ["clone", "lookups", "bytes"].into_iter().enumerate() {
        let (first, last) = (first[at], last[at]);
        assert!(last <= 2 * first, "{what}: {first} on day 10, {last} now");
    }

    let oldest = days.saturating_sub(kept) + 1;
    let root = ROOT_INO;
    let usage = timed("du", &volume, || volume.controls().usage(root).unwrap());
    println!("  {usage:?}");
    let found = timed("fsck", &volume, || {
        volume.tree().verify(&mut |_| {}).unwrap()
    });
    assert!(found.is_empty(), "{found:?}");
    for day in [days, oldest] {
        let name = name(day);
        timed(&format!("rm {name}"), &volume, || {
            let trees = volume.trees();
            trees
                .remove_tree(&Caller::root(), ROOT_INO, name.as_bytes())
                .unwrap();
            volume.forget_all();
            volume.checkpoint().unwrap();
        });
    }
    look(&volume);
    // The way to the past: each day holds the day before.
    let mut dir = ROOT_INO;
    for day in (oldest + 1..days).rev().take(50) {
        dir = volume
            .names()
            .lookup(dir, name(day).as_bytes())
            .unwrap()
            .ino;
    }
    let file = volume.names().lookup(dir, b"f0007").unwrap().ino;
    assert_eq!(
        volume.files().read(file, 0, FILE_BYTES as u32).unwrap(),
        content(7)
    );
    volume.forget_all();
    timed("unmount", &volume, || volume.close().unwrap());
    drop(volume);
    let volume = open(&device);
    let found = timed("fsck", &volume, || {
        volume.tree().verify(&mut |_| {}).unwrap()
    });
    assert!(found.is_empty(), "{found:?}");
    look(&volume);
}

#[test]
fn a_volume_is_cloned_into_itself_every_day_and_all_days_are_kept() {
    days_pass(usize::MAX);
}

#[test]
fn a_volume_is_cloned_into_itself_every_day_and_a_week_is_kept() {
    days_pass(7);
}
