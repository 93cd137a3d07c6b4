//! Damage to every kind of structure is noticed, or does no harm.
//!
//! `RAMET_SEED` and `RAMET_SEEDS` choose the volumes, `RAMET_DAMAGES` the damaged images of each.

use std::sync::Mutex;

use ramet_block::Codec;
use ramet_sim::{Setup, Structure, Verdicts, Victim, env_u64, for_seeds};

#[test]
fn no_damage_makes_a_wrong_byte() {
    let first = env_u64("RAMET_SEED", 1);
    let damages = env_u64("RAMET_DAMAGES", 400);
    let end = first + env_u64("RAMET_SEEDS", 8);
    let total = Mutex::new(Verdicts::default());
    for_seeds(
        first,
        |seed| seed < end,
        |seed| {
            let mut setup = Setup {
                device_bytes: 6 << 20,
                ..Setup::tight_of(seed, 64 << 10)
            };
            if seed.is_multiple_of(2) {
                // Runs of several blocks of the device, so that those behind the front are hit too.
                for shape in [&mut setup.format.shape, &mut setup.open.shape] {
                    let shape = shape.get_or_insert_default();
                    (shape.leaf_bytes, shape.codec) = (32 << 10, Codec::Raw);
                }
            }
            let victim = Victim::new(&setup, seed, 250, 200).unwrap_or_else(|e| panic!("{e}"));
            let verdicts = victim.damage(damages).unwrap_or_else(|e| panic!("{e}"));
            total.lock().expect("no panic holds it").add(&verdicts);
        },
    );
    let total = total.into_inner().expect("no panic holds it");
    println!("{} images: {total:#?}", total.total());
    for structure in [
        Structure::Journal,
        Structure::NodeTable,
        Structure::SpaceMap,
        Structure::Root,
        Structure::Skeleton,
        Structure::RunIndex,
        Structure::RunBlock,
    ] {
        assert!(
            total.detected.contains_key(&structure),
            "{structure:?} was never noticed"
        );
    }
    // Two copies, and only one is hit. A slot whose first copy cannot be read may hold a newer one,
    // and is refused.
    let count = |verdicts: &std::collections::BTreeMap<_, u64>| {
        verdicts.get(&Structure::Superblock).copied().unwrap_or(0)
    };
    assert!(count(&total.detected) * 4 < count(&total.harmless));
}
