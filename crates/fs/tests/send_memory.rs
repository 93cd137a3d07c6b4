//! The memory of a stream that goes down a tree of many levels.
//!
//! One test in a file of its own, since the allocator counts for all threads of the process.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use common::make;
use peak_alloc::PeakAlloc;
use ramet_block::{Budget, Device, MemDevice, Use};
use ramet_fs::{
    ControlState, FormatOptions, Ino, Kind, OpenOptions, ROOT_INO, SendPage, SendRequest, Volume,
};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

const MIB: usize = 1 << 20;
const LEVELS: usize = 500;

/// The pages of the stream of a directory; `each` comes before each of them.
fn send(volume: &Volume, dir: Ino, mut each: impl FnMut()) {
    let state = ControlState::default();
    let ask = |dir, request: &SendRequest| {
        let controls = volume.controls();
        let told = controls.send(&state, volume.snapshots(), (dir, request));
        SendPage::decode(&told.unwrap())
    };
    let session = 7;
    let add = SendRequest::Add {
        session,
        begins: true,
        root: 0,
        name: b"d".to_vec(),
        at: None,
        base: None,
    };
    let _ = ask(dir, &add);
    loop {
        let page = ask(ROOT_INO, &SendRequest::Next { session }).unwrap();
        each();
        if page.ends_stream {
            return;
        }
    }
}

#[test]
fn memory_of_a_stream_grows_with_the_levels_and_not_with_their_square() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(512 * MIB as u64));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let options = OpenOptions {
        budget: Some(Budget::of_volumes(16 * MIB as u64)),
        ..OpenOptions::default()
    };
    let volume = Volume::open(device, options).unwrap();
    let top = make(&volume, ROOT_INO, "d", Kind::Directory).ino;
    let (mut dir, name) = (top, "n".repeat(255));
    for _ in 0..LEVELS {
        // Entries behind that of the next level wait for it.
        for number in 0..4 {
            make(&volume, dir, &format!("o{number}"), Kind::Fifo);
        }
        dir = make(&volume, dir, &name, Kind::Directory).ino;
    }
    volume.checkpoint().unwrap();
    // The cache is full of nodes then.
    send(&volume, top, || {});
    let budget = volume.tree().budget();
    let cached = || budget.used(Use::Cache) as usize;
    let before = MEMORY.current_usage() - cached();
    let (mut used, mut told) = (Vec::new(), 0);
    send(&volume, top, || {
        used.push((MEMORY.current_usage() - cached()).saturating_sub(before));
        told = told.max(budget.used(Use::Requests) as usize);
    });
    // Requests of the tree take memory for a moment.
    used.sort_unstable();
    let median = used[used.len() / 2];
    println!("{} KiB, {} told at most", median >> 10, told >> 10);
    // One path for each level takes 32 MiB.
    assert!(median < 12 * MIB, "{median}");
    assert!((LEVELS * 512..4 * MIB).contains(&told), "{told}");
    volume.close().unwrap();
}
