//! The cost of a clone: time that does not depend on the size, space that grows with the changes.
//!
//! `RAMET_TREE` names a real tree to use instead of the synthetic one of `RAMET_FILES` files.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ramet_e2e::control::clone_timed;
use ramet_e2e::tree::synthesize;
use ramet_e2e::{Bed, number, run_ok, seeded};
use rand::Rng;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// Bounds on time hold on a quiet machine: `RAMET_STRICT=1` asserts them, else they are printed.
fn check_time(what: &str, ok: bool) {
    if !ok {
        assert!(number("RAMET_STRICT", 0) == 0, "{what}");
        println!("slower than promised on this machine at this moment: {what}");
    }
}

#[test]
fn clones_of_all_sizes_cost_the_same() {
    let bed = Bed::new("16G");
    let mut rng = seeded("cost");
    let mount = bed.mount(&[]);
    let (first, tree) = (mount.root().join("first"), mount.root().join("tree"));
    match std::env::var_os("RAMET_TREE") {
        Some(path) => {
            run_ok("cp", &[Path::new("-aT"), &PathBuf::from(path), &first]);
        }
        None => {
            let files = number("RAMET_FILES", 3000) as usize;
            synthesize(&first, files, &mut rng).expect("the mount takes a tree");
        }
    }
    // The first clone of a directory takes its hard links out of the trees around it, one by one.
    // The copy then has them inside, and clones as a whole.
    mount.clone_path(&first, &tree);
    let empty = mount.root().join("empty");
    std::fs::create_dir(&empty).expect("the mount is writable");

    mount.allocated_settled();
    let clones = mount.root().join("clones");
    std::fs::create_dir(&clones).expect("the mount is writable");
    let median_of_100 = |what: &str, src: &Path, stem: &str| {
        let mut times: Vec<Duration> = (0..100)
            .map(|k| clone_timed(src, &clones, &format!("{stem}{k}")).expect("it clones"))
            .collect();
        times.sort();
        let (median, max) = (times[times.len() / 2], times[times.len() - 1]);
        println!(
            "clone of {what}: median {median:?}, maximum {max:?} of {}",
            times.len()
        );
        median
    };
    let before = mount.allocated_settled();
    let of_tree = median_of_100("the tree", &tree, "t");
    let grown = mount.allocated_settled().saturating_sub(before);
    println!("allocated: {} KiB per clone of the tree", grown / 100 / KIB);
    assert!(grown <= 100 * 64 * KIB, "100 clones took {grown} bytes");
    let of_empty = median_of_100("an empty directory", &empty, "e");

    check_time("median <= 1 ms", of_tree <= Duration::from_millis(1));
    let (low, high) = (of_tree.min(of_empty), of_tree.max(of_empty));
    check_time("tree and empty directory within 3x", high <= low * 3);
    mount.umount();
    bed.fsck();
}

#[test]
fn edits_of_a_clone_take_space_by_their_own_size() {
    let bed = Bed::new("8G");
    let mut rng = seeded("space");
    let mount = bed.mount(&[]);
    let len = number("RAMET_FILE_MIB", 256) * MIB;
    let file = mount.root().join("file");
    let mut bytes = vec![0u8; MIB as usize];
    let out = File::create(&file).expect("the mount is writable");
    for at in (0..len).step_by(MIB as usize) {
        rng.fill(&mut bytes[..]);
        out.write_all_at(&bytes, at).expect("there is room");
    }
    drop(out);
    let full = mount.allocated_settled();
    let copied = mount.root().join("clone");
    mount.clone_path(&file, &copied);
    let before = mount.allocated_settled();
    println!(
        "clone of {} MiB: {} KiB",
        len / MIB,
        before.saturating_sub(full) / KIB
    );
    assert!(
        before <= full + 64 * KIB,
        "the clone took {} bytes",
        before - full
    );

    let writes: Vec<(u64, [u8; 16])> = (0..8192)
        .map(|_| (rng.random_range(0..len - 16), rng.random()))
        .collect();
    let out = File::options()
        .write(true)
        .open(&copied)
        .expect("it exists");
    for (at, bytes) in &writes {
        out.write_all_at(bytes, *at).expect("there is room");
    }
    drop(out);
    let grown = mount.allocated_settled().saturating_sub(before);
    println!(
        "8192 writes of 16 bytes: allocated grew by {} KiB",
        grown / KIB
    );
    assert!(grown <= 8 * 8192 * 16, "8192 x 16 bytes took {grown} bytes");

    // The clone has the writes, and only the clone.
    let (a, b) = (
        File::open(&file).expect("it exists"),
        File::open(&copied).expect("it exists"),
    );
    let mut expected = vec![0u8; len as usize];
    a.read_exact_at(&mut expected, 0).expect("the source reads");
    let before_edits = xxhash_rust::xxh3::xxh3_64(&expected);
    for (at, bytes) in &writes {
        expected[*at as usize..][..16].copy_from_slice(bytes);
    }
    let mut found = vec![0u8; len as usize];
    b.read_exact_at(&mut found, 0).expect("the clone reads");
    assert!(expected == found, "the clone is not source + edits");
    drop((a, b));
    mount.umount();
    bed.fsck();
    let mount = bed.mount(&[]);
    let again = ramet_e2e::tree::digest(&file).expect("the source reads");
    assert_eq!(
        again, before_edits,
        "an edit of the clone shows on the source"
    );
    mount.umount();
}
