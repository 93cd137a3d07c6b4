//! Power cuts at every write and sync of random histories, of the tree and of the file system.
//!
//! `RAMET_SEED` chooses the first history, `RAMET_STATES` how many states are opened: see
//! `./soak crash`.

use std::sync::Mutex;
use std::time::Instant;

use ramet_sim::{CrashPlan, CrashReport, CrashRun, Setup, env_u64, for_seeds};

fn plan(seed: u64) -> CrashPlan {
    CrashPlan {
        seed,
        batches: 150,
        keys_max: 100,
        images: 2,
        again_one_in: 40,
        cut_one_in: 1,
        verify_one_in: 8,
        dies_at_superblocks: false,
    }
}

fn tree(seed: u64) -> Result<CrashRun, String> {
    CrashRun::record(&Setup::tight_of(seed, 64 << 10), plan(seed))
}

fn files(seed: u64) -> Result<CrashRun, String> {
    let plan = CrashPlan {
        batches: 120,
        keys_max: 24,
        ..plan(seed)
    };
    CrashRun::record_files(&Setup::tight_of(seed, 256 << 10), plan)
}

/// Whether the histories had all that makes a state hard.
fn covers_all(report: &CrashReport) -> bool {
    let counts = [
        report.clones,
        report.ingests,
        report.kills,
        report.power_cuts,
        report.checkpoints,
        report.laps,
    ];
    counts.iter().all(|count| *count > 0)
}

/// Runs histories with successive seeds on two threads until so many states were opened, and on
/// up to four times as many until the histories had all that makes a state hard.
fn run(
    what: &str,
    (first, states): (u64, u64),
    record: fn(u64) -> Result<CrashRun, String>,
) -> CrashReport {
    let total = Mutex::new(CrashReport::default());
    let (first, start) = (env_u64("RAMET_SEED", first), Instant::now());
    let so_far = || *total.lock().expect("no panic holds it");
    let end = for_seeds(
        first,
        |_| {
            let so_far = so_far();
            let wanted = if covers_all(&so_far) {
                states
            } else {
                4 * states
            };
            so_far.images < wanted
        },
        |seed| {
            let report = record(seed).and_then(|run| run.cut_everywhere());
            let report = report.unwrap_or_else(|e| panic!("{what}: {e}"));
            total.lock().expect("no panic holds it").add(&report);
        },
    );
    let total = total.into_inner().expect("no panic holds it");
    let rate = total.images as f64 / start.elapsed().as_secs_f64();
    println!("{what}: seeds {first}..{end}, {rate:.0} states/s, {total:?}");
    assert!(total.during_recovery * 5 >= total.images);
    assert!(covers_all(&total));
    total
}

#[test]
fn every_power_cut_leaves_a_prefix_of_the_batches() {
    let total = run("tree", (1, env_u64("RAMET_STATES", 50_000)), tree);
    assert!(total.interruptions > 0);
}

#[test]
fn every_power_cut_leaves_a_prefix_of_the_operations_on_files() {
    // Few histories of files make a lap of the journal. One of the first two from here on does.
    let states = env_u64("RAMET_STATES", 50_000) * 3 / 17;
    run("files", (11, states), files);
}

#[test]
fn a_superblock_or_a_frame_cut_at_any_byte_leaves_a_prefix() {
    // Small, with a journal that goes round.
    let run = tree(2).unwrap_or_else(|e| panic!("{e}"));
    let report = run.cut_at_every_byte(1).unwrap_or_else(|e| panic!("{e}"));
    println!("{report:?}");
    assert!(report.images > 2 * 4096);
}
