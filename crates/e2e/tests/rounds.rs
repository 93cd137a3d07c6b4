//! Rounds of clone and edit through the mount (BetrFS 0.5, section 5.2, figure 10): nothing may cost more in a late round.
//!
//! `RAMET_ROUNDS` (40), `RAMET_FILES` (16) and `RAMET_FILE_KIB` (256) make it as large as in the paper, with 10000, 64 and 4096.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ramet_e2e::control::clone_timed;
use ramet_e2e::{Bed, Mount, number, seeded};
use rand::Rng;

const EDIT_BYTES: usize = 16;
const KIB: u64 = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Edited {
    HeadTail,
    HeadHead,
    TailTail,
}

fn file(version: &Path, number: u64) -> PathBuf {
    version.join(format!("dir{}/file{}", number / 8, number % 8))
}

fn count(mount: &Mount, name: &str) -> u64 {
    mount.stat()[name]
        .as_u64()
        .unwrap_or_else(|| panic!("no {name} in stat"))
}

/// Compares all files with `expected`; returns the reads that took, and their bytes, with nothing cached before.
fn scan_cold(bed: &Bed, mount: Mount, version: &str, expected: &[Vec<u8>]) -> (Mount, u64, u64) {
    mount.umount();
    let mount = bed.mount(&[]);
    let before = (count(&mount, "node_reads"), count(&mount, "bytes_read"));
    let version = mount.root().join(version);
    for (number, expected) in expected.iter().enumerate() {
        let found = std::fs::read(file(&version, number as u64)).expect("the file is there");
        assert!(found == *expected, "file {number} of {}", version.display());
    }
    let reads = count(&mount, "node_reads") - before.0;
    let bytes = count(&mount, "bytes_read") - before.1;
    (mount, reads, bytes)
}

fn rounds(edited: Edited) {
    let (rounds, files) = (number("RAMET_ROUNDS", 40), number("RAMET_FILES", 16));
    let file_bytes = number("RAMET_FILE_KIB", 256) * KIB;
    let mut rng = seeded("rounds");
    let bed = Bed::new("64G");
    let mut mount = bed.mount(&[]);
    let head = mount.root().join("v0");
    let mut expected: Vec<Vec<u8>> = Vec::new();
    for number in 0..files {
        let mut bytes = vec![0u8; file_bytes as usize];
        rng.fill(&mut bytes[..]);
        let path = file(&head, number);
        std::fs::create_dir_all(path.parent().expect("it has one")).expect("the mount is writable");
        std::fs::write(path, &bytes).expect("there is room");
        expected.push(bytes);
    }
    let unedited = expected.clone();
    let samples: Vec<u64> = if rounds < 400 {
        vec![rounds / 4, rounds / 2, rounds]
    } else {
        let usual = [100, 300, 1000, 3000, 5000, 10_000];
        usual.into_iter().filter(|&at| at <= rounds).collect()
    };
    let (mut last_round, mut last_bytes) = (0, mount.allocated_settled());
    let mut measured: Vec<(u64, u64)> = Vec::new();
    let mut times = Vec::new();
    for round in 1..=rounds {
        let name = |round: u64| format!("v{round}");
        let source = if edited == Edited::TailTail {
            round - 1
        } else {
            0
        };
        let root = mount.root().to_path_buf();
        times.push(clone_timed(&root.join(name(source)), &root, &name(round)).expect("it clones"));
        let target = if edited == Edited::HeadHead { 0 } else { round };
        if edited == Edited::HeadTail {
            expected.clone_from(&unedited);
        }
        let offset = rng.random_range(0..file_bytes - EDIT_BYTES as u64);
        for number in 0..files {
            let mut bytes = [0u8; EDIT_BYTES];
            rng.fill(&mut bytes[..]);
            let path = file(&root.join(name(target)), number);
            let open = File::options()
                .write(true)
                .open(path)
                .expect("the file is there");
            open.write_all_at(&bytes, offset).expect("there is room");
            expected[number as usize][offset as usize..][..EDIT_BYTES].copy_from_slice(&bytes);
        }
        if !samples.contains(&round) {
            continue;
        }
        let allocated = mount.allocated_settled();
        let per_round = allocated.saturating_sub(last_bytes) / (round - last_round);
        times.sort_unstable();
        let part = |percent: usize| times[times.len() * percent / 100];
        let (p10, median, p99) = (part(10), part(50), part(99));
        let (again, reads, bytes) = scan_cold(&bed, mount, &name(target), &expected);
        mount = again;
        println!(
            "{edited:?} round {round}: clone {median:?}, p10 {p10:?}, p99 {p99:?}; {per_round} bytes a round; \
             cold scan {reads} reads, {bytes} bytes; {} nodes, height {}",
            count(&mount, "nodes"),
            count(&mount, "height")
        );
        assert!(
            per_round <= 24 * KIB * files.div_ceil(64) + 16 * KIB,
            "{per_round} bytes a round"
        );
        measured.push((reads, bytes));
        times.clear();
        (last_round, last_bytes) = (round, mount.allocated_settled());
    }
    let (first, last) = (measured[0], measured[measured.len() - 1]);
    // A version of a few files is read in so few requests that each segment counts; at full size a twentieth is much.
    let part = if rounds < 400 { 4 } else { 20 };
    assert!(
        last.1 * part <= first.1 * (part + 1),
        "a scan reads {} bytes, and {} at first",
        last.1,
        first.1
    );
    assert!(
        rounds < 400 || last.0 * part <= first.0 * (part + 1),
        "a scan takes {} reads, and {} at first",
        last.0,
        first.0
    );
    mount.umount();
    // Every version shows every file: at full size that is terabytes.
    if rounds * files * file_bytes < 1 << 30 {
        bed.fsck();
    } else {
        bed.fsck_nodes();
    }
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
