//! The memory of a merge of files with large extended attributes.
//!
//! One test in a file of its own, since the allocator counts for all threads of the process.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use common::{find, make};
use peak_alloc::PeakAlloc;
use ramet_block::{Budget, Device, MemDevice, Use};
use ramet_fs::{
    Caller, Error, FormatOptions, Ino, Kind, MergeOptions, NewFork, OpenOptions, ROOT_INO,
    SetXattr, Volume, XATTR_BYTES_MAX, merge_fork,
};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

const MIB: usize = 1 << 20;
const BUDGET_BYTES: usize = 16 * MIB;
/// The most memory of a merge: the cache of nodes may fill meanwhile.
const BYTES_MAX: usize = 2 * BUDGET_BYTES;
/// Attributes of one file: 64 MiB.
const ATTRIBUTES: usize = 1024;

fn name(number: usize) -> String {
    format!("user.{number}")
}

fn set(volume: &Volume, file: Ino, numbers: std::ops::Range<usize>, byte: u8) {
    let (attributes, any) = (volume.attributes(), SetXattr::Any);
    for number in numbers {
        let value = vec![byte; XATTR_BYTES_MAX];
        let name = name(number);
        attributes
            .setxattr(file, name.as_bytes(), &value, any)
            .unwrap();
    }
}

/// Runs `act`, and tells the most memory that came with it.
fn most<T>(act: impl FnOnce() -> T) -> (T, usize) {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let done = act();
    (done, MEMORY.peak_usage().saturating_sub(before))
}

#[test]
fn a_merge_holds_only_attributes_that_it_tells_the_budget_of() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(1024 * MIB as u64));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let options = OpenOptions {
        budget: Some(Budget::of_volumes(BUDGET_BYTES as u64)),
        ..OpenOptions::default()
    };
    let volume = Volume::open(device, options).unwrap();
    let src = make(&volume, ROOT_INO, "src", Kind::Directory).ino;
    for file in ["changed", "equal", "taken"] {
        make(&volume, src, file, Kind::Regular);
    }
    set(&volume, find(&volume, "src/changed"), 0..ATTRIBUTES, 1);
    set(&volume, find(&volume, "src/equal"), 0..ATTRIBUTES, 1);
    volume.checkpoint().unwrap();
    let new = NewFork {
        note: "",
        has_base: true,
    };
    let (trees, root) = (volume.trees(), Caller::root());
    trees.fork(&root, src, (ROOT_INO, b"fork"), new).unwrap();
    let fork = find(&volume, "fork");
    let merge = || {
        let both = (volume.trees(), volume.controls().forks());
        merge_fork(both, &root, (fork, src), &MergeOptions::default())
    };
    // One attribute of many changes, and all of another file change on both sides alike.
    set(&volume, find(&volume, "fork/changed"), 7..8, 2);
    for top in ["src", "fork"] {
        set(
            &volume,
            find(&volume, &format!("{top}/equal")),
            0..ATTRIBUTES,
            3,
        );
    }
    volume.checkpoint().unwrap();
    let (merged, bytes) = most(merge);
    println!("{} KiB for one attribute", bytes >> 10);
    let merged = merged.unwrap();
    assert!(merged.is_done);
    assert_eq!(merged.names.len(), 1);
    let attributes = volume.attributes();
    let value = |number| {
        let file = find(&volume, "src/changed");
        attributes.getxattr(file, name(number).as_bytes()).unwrap()
    };
    assert_eq!([value(7)[0], value(8)[0]], [2, 1]);
    assert!(bytes < BYTES_MAX, "{bytes}");
    // More than the budget has would be held.
    set(&volume, find(&volume, "fork/taken"), 0..ATTRIBUTES, 4);
    volume.checkpoint().unwrap();
    let (merged, bytes) = most(merge);
    println!("{} KiB for all attributes", bytes >> 10);
    assert!(matches!(merged, Err(Error::Range)), "{merged:?}");
    assert!(bytes < BYTES_MAX, "{bytes}");
    assert_eq!(volume.tree().budget().used(Use::Requests), 0);
}
