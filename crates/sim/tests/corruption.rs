//! Damage to every kind of structure is noticed, or does no harm.
//!
//! `RAMET_SEED` and `RAMET_SEEDS` choose the volumes, `RAMET_DAMAGES` the damaged images of each.

use ramet_sim::{Setup, Structure, Verdicts, Victim, env_u64};

#[test]
fn no_damage_makes_a_wrong_byte() {
    let first = env_u64("RAMET_SEED", 1);
    let damages = env_u64("RAMET_DAMAGES", 400);
    let mut total = Verdicts::default();
    for seed in first..first + env_u64("RAMET_SEEDS", 8) {
        let setup = Setup {
            device_bytes: 6 << 20,
            ..Setup::tiny_nodes_of(seed)
        };
        let victim = Victim::new(&setup, seed, 250, 300).unwrap_or_else(|e| panic!("{e}"));
        let verdicts = victim.damage(damages).unwrap_or_else(|e| panic!("{e}"));
        total.add(&verdicts);
    }
    println!("{} images: {total:#?}", total.total());
    for structure in [
        Structure::Journal,
        Structure::NodeTable,
        Structure::Skeleton,
        Structure::RunIndex,
        Structure::RunBlock,
    ] {
        assert!(
            total.detected.contains_key(&structure),
            "{structure:?} was never noticed"
        );
    }
    // Two copies, and only one is hit.
    assert!(!total.detected.contains_key(&Structure::Superblock));
}
