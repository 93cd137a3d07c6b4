//! Volumes that lost all copies of metadata are rebuilt: see [`ramet_sim::Victim::rebuild`].
//!
//! `RAMET_SEED` and `RAMET_SEEDS` choose the volumes, `RAMET_DAMAGES` the images of each.

use std::sync::Mutex;

use ramet_sim::{RebuildReport, Setup, Victim, env_u64, for_seeds};

#[test]
fn what_lies_on_the_device_comes_back_and_nothing_deleted_does() {
    let first = env_u64("RAMET_SEED", 1);
    let damages = env_u64("RAMET_DAMAGES", 24);
    let end = first + env_u64("RAMET_SEEDS", 8);
    let total = Mutex::new(RebuildReport::default());
    for_seeds(
        first,
        |seed| seed < end,
        |seed| {
            let setup = Setup {
                device_bytes: 6 << 20,
                ..Setup::tight_of(seed, 64 << 10)
            };
            let victim = Victim::new(&setup, seed, 250, 200).unwrap_or_else(|e| panic!("{e}"));
            let report = victim.rebuild(damages).unwrap_or_else(|e| panic!("{e}"));
            total.lock().expect("no panic holds it").add(&report);
        },
    );
    let total = total.into_inner().expect("no panic holds it");
    println!("{total:#?}");
    assert!(
        total.whole > 0 && total.partial > 0 && total.cuts > 0,
        "{total:?}"
    );
}
