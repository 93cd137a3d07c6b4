//! Power cuts at every write and sync of random histories.
//!
//! `RAMET_SEED` and `RAMET_SEEDS` choose the histories, `RAMET_BATCHES` their length.

use ramet_sim::{CrashPlan, CrashReport, CrashRun, Setup, env_u64};

fn run(device_bytes: u64, keys_max: usize, batches: u64, seeds: u64) -> CrashReport {
    let setup = Setup {
        device_bytes,
        ..Setup::tiny_nodes()
    };
    let first = env_u64("RAMET_SEED", 1);
    let mut total = CrashReport::default();
    for seed in first..first + env_u64("RAMET_SEEDS", seeds) {
        let batches = usize::try_from(env_u64("RAMET_BATCHES", batches)).expect("a sane number");
        let plan = CrashPlan {
            seed,
            batches,
            keys_max,
            images: 2,
            again_one_in: 40,
        };
        let run = CrashRun::record(&setup, plan).unwrap_or_else(|e| panic!("{e}"));
        let report = run.cut_everywhere().unwrap_or_else(|e| panic!("{e}"));
        total.positions += report.positions;
        total.images += report.images;
        total.during_recovery += report.during_recovery;
        total.newest += report.newest;
        total.kills += report.kills;
        total.checkpoints += report.checkpoints;
        total.clones += report.clones;
        total.refused += report.refused;
    }
    println!("{total:?}");
    total
}

#[test]
fn every_power_cut_leaves_a_prefix_of_history() {
    let total = run(6 << 20, 200, 150, 6);
    assert!(
        total.images > 1000 && total.clones > 0 && total.kills > 0 && total.during_recovery > 0
    );
}
