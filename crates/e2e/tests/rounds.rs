//! Rounds of clone and edit through the mount (BetrFS 0.5, section 5.2, figure 10): nothing may
//! cost more in a late round.
//!
//! `RAMET_ROUNDS` (40), `RAMET_FILES` (16) and `RAMET_FILE_KIB` (256) make it as large as in the
//! paper, with 10000, 64 and 4096. Then copies of the volume of the first sample and of that of the
//! last go on by turns, since hours on a machine are not alike. The times of clones in both, and
//! the processor times of the daemons, are printed side by side. `RAMET_REPETITIONS` (1) says how
//! often this is done, each time from the same volumes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ramet_e2e::control::clone_timed;
use ramet_e2e::{Bed, Mount, number, seeded};
use rand::Rng;
use rand::rngs::StdRng;

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

/// Compares all files with `expected`; returns the reads that took, and their bytes, with nothing
/// cached before.
fn scan_cold(bed: &Bed, version: &str, expected: &[Vec<u8>]) -> (Mount, u64, u64) {
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

/// The bytes that one round writes into each file.
struct Edit {
    offset: u64,
    bytes: Vec<[u8; EDIT_BYTES]>,
}

impl Edit {
    fn random(rng: &mut StdRng, files: u64, file_bytes: u64) -> Self {
        let offset = rng.random_range(0..file_bytes - EDIT_BYTES as u64);
        let bytes = (0..files).map(|_| rng.random()).collect();
        Self { offset, bytes }
    }

    fn change(&self, files: &mut [Vec<u8>]) {
        for (file, bytes) in files.iter_mut().zip(&self.bytes) {
            file[self.offset as usize..][..EDIT_BYTES].copy_from_slice(bytes);
        }
    }

    fn write(&self, version: &Path) {
        for (number, bytes) in self.bytes.iter().enumerate() {
            let open = File::options()
                .write(true)
                .open(file(version, number as u64));
            let written = open.and_then(|open| open.write_all_at(bytes, self.offset));
            written.expect("the file is there, and room");
        }
    }
}

/// The name of a version.
fn name(round: u64) -> String {
    format!("v{round}")
}

impl Edited {
    /// Which version a round edits.
    fn target(self, round: u64) -> u64 {
        if self == Self::HeadHead { 0 } else { round }
    }

    /// Clones and edits one version; returns the time of the clone.
    fn play(self, root: &Path, round: u64, edit: &Edit) -> Duration {
        let source = if self == Self::TailTail { round - 1 } else { 0 };
        let took = clone_timed(&root.join(name(source)), root, &name(round));
        edit.write(&root.join(name(self.target(round))));
        took.expect("it clones")
    }
}

/// The value that so many hundredths of these stay below.
fn part(times: &mut [Duration], percent: usize) -> Duration {
    times.sort_unstable();
    times[times.len() * percent / 100]
}

/// Tenth, half and 99 hundredths of these.
fn parts(mut times: Vec<Duration>) -> String {
    let [half, tenth, most] = [50, 10, 99].map(|percent| part(&mut times, percent));
    format!("{half:?}, p10 {tenth:?}, p99 {most:?}")
}

/// Goes on by turns in copies of volumes that have had so many rounds, and prints the times of
/// clones in each.
fn by_turns(edited: Edited, histories: [(&Bed, u64); 2], mut edit: impl FnMut() -> Edit) {
    const WARMING: u64 = 50;
    const ROUNDS: u64 = 400;
    let mut all: [Vec<Duration>; 2] = Default::default();
    let mut computed = [Duration::ZERO; 2];
    let mut growth = Vec::new();
    let repetitions = number("RAMET_REPETITIONS", 1);
    for _ in 0..repetitions {
        let beds = histories.map(|(bed, _)| bed.copied());
        let mounts = [0, 1].map(|which: usize| beds[which].mount(&[]));
        let mut times: [Vec<Duration>; 2] = Default::default();
        let mut before = [Duration::ZERO; 2];
        for more in 1..=WARMING + ROUNDS {
            if more == WARMING + 1 {
                times.iter_mut().for_each(Vec::clear);
                before = [0, 1].map(|which| mounts[which].computed());
            }
            let edit = edit();
            for which in [more % 2, 1 - more % 2].map(|which| which as usize) {
                let took = edited.play(mounts[which].root(), histories[which].1 + more, &edit);
                times[which].push(took);
            }
        }
        let [early, late] = times.each_mut().map(|times| part(times, 50).as_secs_f64());
        growth.push(100.0 * (late / early - 1.0));
        for (which, mount) in mounts.into_iter().enumerate() {
            computed[which] += mount.computed() - before[which];
            all[which].append(&mut times[which]);
            mount.umount();
        }
    }
    for (which, times) in all.into_iter().enumerate() {
        let computed = computed[which] / times.len() as u32;
        let (times, rounds) = (parts(times), histories[which].1);
        println!(
            "{edited:?} by turns after round {rounds}: clone {times}; {computed:?} of CPU a round"
        );
    }
    growth.sort_unstable_by(f64::total_cmp);
    println!(
        "{edited:?} by turns: median of a clone grows by {:+.1} % in the middle of {repetitions} repetitions: {growth:+.1?}",
        growth[growth.len() / 2]
    );
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
    let is_full_size = rounds >= 400;
    let samples: Vec<u64> = if is_full_size {
        let usual = [100, 300, 1000, 3000, 5000, 10_000];
        usual.into_iter().filter(|&at| at <= rounds).collect()
    } else {
        vec![rounds / 4, rounds / 2, rounds]
    };
    let (mut last_round, mut last_bytes) = (0, mount.allocated_settled());
    let mut measured: Vec<(u64, u64)> = Vec::new();
    let mut early = None;
    let mut times = Vec::new();
    for round in 1..=rounds {
        let edit = Edit::random(&mut rng, files, file_bytes);
        times.push(edited.play(mount.root(), round, &edit));
        // In (head, tail) the newest version has the edit of its own round alone.
        let is_sample = samples.contains(&round);
        if edited == Edited::HeadTail && is_sample {
            expected.clone_from(&unedited);
        }
        if edited != Edited::HeadTail || is_sample {
            edit.change(&mut expected);
        }
        if !is_sample {
            continue;
        }
        let allocated = mount.allocated_settled();
        let per_round = allocated.saturating_sub(last_bytes) / (round - last_round);
        mount.umount();
        if is_full_size && early.is_none() {
            early = Some((bed.copied(), round));
        }
        let target = name(edited.target(round));
        let (again, reads, bytes) = scan_cold(&bed, &target, &expected);
        mount = again;
        println!(
            "{edited:?} round {round}: clone {}; {per_round} bytes a round; \
             cold scan {reads} reads, {bytes} bytes; {} nodes, height {}",
            parts(std::mem::take(&mut times)),
            count(&mount, "nodes"),
            count(&mount, "height")
        );
        assert!(
            per_round <= 24 * KIB * files.div_ceil(64) + 16 * KIB,
            "{per_round} bytes a round"
        );
        measured.push((reads, bytes));
        (last_round, last_bytes) = (round, mount.allocated_settled());
    }
    mount.umount();
    if let Some((early, round)) = early {
        let histories = [(&early, round), (&bed, rounds)];
        by_turns(edited, histories, || {
            Edit::random(&mut rng, files, file_bytes)
        });
    }
    let (first, last) = (measured[0], measured[measured.len() - 1]);
    // A version of a few files is read in so few requests that each segment counts; at full size a
    // twentieth is much.
    let part = if is_full_size { 20 } else { 4 };
    assert!(
        last.1 * part <= first.1 * (part + 1),
        "a scan reads {} bytes, and {} at first",
        last.1,
        first.1
    );
    assert!(
        !is_full_size || last.0 * part <= first.0 * (part + 1),
        "a scan takes {} reads, and {} at first",
        last.0,
        first.0
    );
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
