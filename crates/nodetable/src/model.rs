//! The shadowing tree against `BTreeMap`.
//!
//! Small page capacities make high trees of few entries, so that splits, merges, borrowing, growing
//! and collapsing roots all happen, in pages on disk and in dirty ones. After every commit tree and
//! map are compared and every invariant is verified; now and then the tree is opened again from its
//! root. `RAMET_SEED` and `RAMET_STEPS` replay or lengthen a run.

use std::collections::BTreeMap;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::testing::{SHAPE, World};
use crate::tree::ShadowTree;

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(default)
}

fn key(rng: &mut StdRng) -> Vec<u8> {
    // Few enough to meet again; of very different lengths, with long common beginnings.
    let n: u16 = rng.random_range(0..600);
    let mut key = vec![b'k'; usize::from(n % 59)];
    key.extend_from_slice(&n.to_be_bytes());
    key
}

fn value(rng: &mut StdRng) -> Vec<u8> {
    let len = if rng.random_bool(0.2) {
        SHAPE.value_max()
    } else {
        rng.random_range(0..40)
    };
    vec![rng.random(); len]
}

fn assert_same(tree: &ShadowTree, model: &Model) {
    let mut found = tree.range(&[]);
    for (key, value) in model {
        let (k, v) = found.next().expect("as many entries as the model").unwrap();
        assert_eq!((&*k, &*v), (&**key, &**value));
    }
    assert!(found.next().is_none());
}

/// One operation. More are insertions than removals, or the other way round, as `grows` says.
fn step(tree: &mut ShadowTree, model: &mut Model, rng: &mut StdRng, grows: bool) {
    let (key, inserts) = (key(rng), if grows { 60 } else { 25 });
    match rng.random_range(0..100) {
        at if at < inserts => {
            let value = value(rng);
            let changed = tree.insert(&key, &value).unwrap();
            let old = model.insert(key, value.clone());
            assert_eq!(changed, old.as_deref() != Some(&*value));
        }
        0..90 => assert_eq!(tree.remove(&key).unwrap(), model.remove(&key).is_some()),
        90..95 => {
            let found = tree.lookup(&key).unwrap();
            assert_eq!(found.as_deref(), model.get(&key).map(|value| &**value));
            let floor = tree.floor(&key).unwrap();
            let want = model.range(..=key).next_back();
            assert_eq!(floor.as_ref().map(|(k, _)| &**k), want.map(|(k, _)| &**k));
        }
        _ => {
            let got = tree.range(&key).take(20).map(|e| e.unwrap().0.to_vec());
            let want = model.range(key.clone()..).take(20).map(|(k, _)| k.clone());
            assert!(got.eq(want));
        }
    }
}

#[test]
fn a_tree_behaves_like_a_map() {
    let seed = number("RAMET_SEED", 1);
    let steps = number("RAMET_STEPS", 60_000);
    println!("RAMET_SEED={seed} RAMET_STEPS={steps}");
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut world, mut model) = (World::new(), Model::new());
    for at in 0..steps {
        step(&mut world.tree, &mut model, &mut rng, at / 3000 % 2 == 0);
        if at % 500 == 499 {
            if rng.random_bool(0.4) {
                world.reopen();
            } else {
                world.commit();
            }
            assert_eq!(world.verify(), [], "step {at}");
            assert_same(&world.tree, &model);
        }
    }
    for key in model.keys() {
        assert!(world.tree.remove(key).unwrap());
    }
    world.commit();
    assert_eq!(world.free_bytes(), World::new().free_bytes());
}

#[test]
fn a_tree_grows_high_and_shrinks_to_nothing() {
    let mut rng = StdRng::seed_from_u64(number("RAMET_SEED", 2));
    let (mut world, mut model) = (World::new(), Model::new());
    let free_at_first = world.free_bytes();
    let mut keys: Vec<[u8; 4]> = (0..20_000u32).map(u32::to_be_bytes).collect();
    for round in 0..2 {
        for key in &keys {
            world.tree.insert(key, &key.repeat(5)).unwrap();
            model.insert(key.to_vec(), key.repeat(5));
        }
        if round == 1 {
            world.reopen();
        } else {
            world.commit();
        }
        assert_eq!(world.verify(), []);
        assert_same(&world.tree, &model);
        for at in (1..keys.len()).rev() {
            keys.swap(at, rng.random_range(0..=at));
        }
        for (n, key) in keys.iter().enumerate() {
            assert!(world.tree.remove(key).unwrap());
            model.remove(&key[..]);
            if n % 5000 == 0 {
                world.reopen();
                assert_eq!(world.verify(), []);
                assert_same(&world.tree, &model);
            }
        }
        world.commit();
        assert_eq!(world.free_bytes(), free_at_first);
    }
}

#[test]
fn sizes_beyond_the_limits_are_refused_and_change_nothing() {
    let mut tree = World::new().tree;
    assert!(tree.insert(&[1; 65], &[]).is_err());
    let long = vec![0; SHAPE.value_max() + 1];
    assert!(tree.insert(&[1; 64], &long).is_err());
    assert!(tree.insert(&[1; 64], &long[1..]).unwrap());
    assert_eq!(tree.range(&[]).count(), 1);
}
