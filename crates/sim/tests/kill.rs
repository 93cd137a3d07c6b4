//! Tools that are killed at each of their writes leave a volume that mounts, or say why not: see
//! [`ramet_sim::kill_everywhere`].
//!
//! `RAMET_SEED` and `RAMET_SEEDS` choose the volumes, `RAMET_KILLS` the images of each at most.

use std::sync::Mutex;

use ramet_sim::{KillReport, Tool, env_u64, for_seeds, kill_everywhere};

fn kill(tool: Tool) -> KillReport {
    let (first, images_max) = (env_u64("RAMET_SEED", 1), env_u64("RAMET_KILLS", 40));
    let end = first + env_u64("RAMET_SEEDS", 2);
    let total = Mutex::new(KillReport::default());
    for_seeds(
        first,
        |seed| seed < end,
        |seed| {
            let images_max = usize::try_from(images_max).expect("a small number");
            let mut report = KillReport::default();
            let done = kill_everywhere(tool, seed, images_max, &mut report);
            done.unwrap_or_else(|e| panic!("{e}"));
            total.lock().expect("no panic holds it").add(&report);
        },
    );
    let total = total.into_inner().expect("no panic holds it");
    println!("{tool:?}: seeds {first}..{end}, {total:#?}");
    assert!(total.opened > 0 && total.images > 20 * (end - first));
    total
}

#[test]
fn killed_repair_leaves_what_the_next_one_repairs() {
    assert!(kill(Tool::Repair).refused > 0);
}

#[test]
fn killed_grow_leaves_the_volume_with_everything_in_it() {
    assert_eq!(kill(Tool::Grow).refused, 0);
}

#[test]
fn killed_scrub_leaves_the_volume_with_everything_in_it() {
    assert_eq!(kill(Tool::Scrub).refused, 0);
}

#[test]
fn killed_mkfs_leaves_the_old_volume_or_the_new_one_or_says_so() {
    for tool in [Tool::MakeAgain, Tool::MakeOther, Tool::Make] {
        assert!(kill(tool).refused > 0);
    }
}
