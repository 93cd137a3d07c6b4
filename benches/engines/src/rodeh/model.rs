//! Shadowing trees against `BTreeMap`, where a clone is a copy of the map.
//!
//! Small page capacities make high trees of few entries, so that splits, merges, borrowing, growing
//! and collapsing roots all happen, in shared and in private pages. After every commit all trees
//! are compared; now and then the forest is opened again from its roots. At the end all space is
//! free again. `RAMET_SEED` and `RAMET_STEPS` replay or lengthen a run.

use std::collections::BTreeMap;
use std::sync::Arc;

use ramet_block::{Device, Extent, MemDevice, PageRef};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::forest::Forest;
use super::page::{Shape, Structure};
use super::tree::ShadowTree;

const USABLE: Extent = Extent::new(1 << 20, 255 << 20);
const CACHE_BYTES: usize = 100 << 20;
const SHAPE: Shape = Shape::new(Structure::Plain, 4096).with_capacity(704);

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

struct World {
    device: Arc<dyn Device>,
    forest: Forest,
    live: Vec<(ShadowTree, Model)>,
}

impl World {
    fn new() -> Self {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(USABLE.end()));
        let forest = Forest::format(&device, USABLE, CACHE_BYTES).unwrap();
        let first = forest.tree(SHAPE, PageRef::NONE);
        Self {
            device,
            forest,
            live: vec![(first, Model::new())],
        }
    }

    fn commit(&mut self, reopen: bool, compare: bool) {
        let mut trees: Vec<&mut ShadowTree> = self.live.iter_mut().map(|(tree, _)| tree).collect();
        let (roots, maps, freed) = self.forest.commit(&mut trees).unwrap();
        self.forest.committed(freed);
        if reopen {
            self.forest = Forest::open(&self.device, maps, USABLE, CACHE_BYTES).unwrap();
            for ((tree, _), root) in self.live.iter_mut().zip(roots) {
                *tree = self.forest.tree(SHAPE, root);
            }
        }
        if compare {
            self.live
                .iter()
                .for_each(|(tree, model)| assert_same(tree, model));
        }
    }

    fn step(&mut self, rng: &mut StdRng, clones: usize) {
        let at = rng.random_range(0..self.live.len());
        match rng.random_range(0..100) {
            0..3 if self.live.len() < clones => {
                let (tree, model) = &self.live[at];
                let clone = (tree.clone_tree(), model.clone());
                self.live.push(clone);
            }
            3 if self.live.len() > clones / 2 => {
                self.live.swap_remove(at).0.delete_tree().unwrap();
            }
            4..60 => {
                let (key, value) = (key(rng), value(rng));
                let (tree, model) = &mut self.live[at];
                let changed = tree.insert(&key, &value).unwrap();
                let old = model.insert(key, value.clone());
                assert_eq!(changed, old.as_deref() != Some(&*value));
            }
            60..90 => {
                let key = key(rng);
                let (tree, model) = &mut self.live[at];
                assert_eq!(tree.remove(&key).unwrap(), model.remove(&key).is_some());
            }
            90..95 => {
                let key = key(rng);
                let (tree, model) = &self.live[at];
                assert_eq!(
                    tree.lookup(&key).unwrap().as_deref(),
                    model.get(&key).map(|v| &**v)
                );
                let floor = tree.floor(&key).unwrap();
                let want = model.range(..=key.clone()).next_back();
                assert_eq!(floor.as_ref().map(|(k, _)| &**k), want.map(|(k, _)| &**k));
            }
            _ => {
                let from = key(rng);
                let (tree, model) = &self.live[at];
                let got: Vec<_> = tree
                    .range(&from)
                    .take(20)
                    .map(|e| e.unwrap().0.to_vec())
                    .collect();
                let want: Vec<_> = model
                    .range(from..)
                    .take(20)
                    .map(|(k, _)| k.clone())
                    .collect();
                assert_eq!(got, want);
            }
        }
    }
}

#[test]
fn trees_and_256_clones_behave_like_maps_and_copies() {
    let seed = number("RAMET_SEED", 1);
    let steps = number("RAMET_STEPS", 60_000);
    println!("RAMET_SEED={seed} RAMET_STEPS={steps}");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut world = World::new();
    let free_at_first = world.forest.free_bytes();
    let mut most = 0;
    for step in 0..steps {
        world.step(&mut rng, 400);
        most = most.max(world.live.len());
        if step % 1500 == 1499 {
            world.commit(rng.random_bool(0.4), step % 6000 == 5999);
        }
    }
    world.commit(true, true);
    println!("{most} trees at most, {} at the end", world.live.len());
    assert!(most >= 257);
    while !world.live.is_empty() {
        let at = rng.random_range(0..world.live.len());
        world.live.swap_remove(at).0.delete_tree().unwrap();
        if world.live.len().is_multiple_of(50) {
            world.commit(rng.random_bool(0.5), false);
        }
    }
    world.commit(false, false);
    // The map itself may take another page or none less than at first.
    assert_eq!(world.forest.free_bytes(), free_at_first);
}

#[test]
fn one_tree_grows_high_and_shrinks_to_nothing() {
    let mut rng = StdRng::seed_from_u64(number("RAMET_SEED", 2));
    let mut world = World::new();
    let free_at_first = world.forest.free_bytes();
    let mut keys: Vec<[u8; 4]> = (0..20_000u32).map(u32::to_be_bytes).collect();
    for round in 0..2 {
        for key in &keys {
            world.live[0].0.insert(key, &key.repeat(5)).unwrap();
            world.live[0].1.insert(key.to_vec(), key.repeat(5));
        }
        world.commit(round == 1, true);
        for at in (1..keys.len()).rev() {
            keys.swap(at, rng.random_range(0..=at));
        }
        for (n, key) in keys.iter().enumerate() {
            assert!(world.live[0].0.remove(key).unwrap());
            world.live[0].1.remove(&key[..]);
            if n % 5000 == 0 {
                world.commit(n % 10_000 == 0, true);
            }
        }
        world.commit(false, true);
        assert_eq!(world.forest.free_bytes(), free_at_first);
    }
}

#[test]
fn deleting_a_clone_frees_its_own_pages_only_and_reads_few() {
    let mut world = World::new();
    for n in 0..20_000u32 {
        world.live[0].0.insert(&n.to_be_bytes(), &[1; 20]).unwrap();
    }
    world.commit(false, false);
    let free = world.forest.free_bytes();
    for n in 0..100u32 {
        let mut clone = world.live[0].0.clone_tree();
        clone.insert(&(n * 200).to_be_bytes(), &[2; 20]).unwrap();
        world.live.push((clone, Model::new()));
    }
    world.commit(false, false);
    let per_clone = (free - world.forest.free_bytes()) / 100;
    assert!(
        per_clone <= 6 * 4096,
        "{per_clone} bytes per clone: a path of pages and a share of maps"
    );
    for (clone, _) in world.live.drain(1..) {
        clone.delete_tree().unwrap();
    }
    world.commit(false, false);
    assert_eq!(world.forest.free_bytes(), free);
}

#[test]
fn sizes_beyond_the_limits_are_refused_and_change_nothing() {
    let mut world = World::new();
    let tree = &mut world.live[0].0;
    assert!(tree.insert(&[1; 65], &[]).is_err());
    assert!(
        tree.insert(&[1; 64], &vec![0; SHAPE.value_max() + 1])
            .is_err()
    );
    assert!(tree.insert(&[1; 64], &vec![0; SHAPE.value_max()]).unwrap());
    assert_eq!(tree.range(&[]).count(), 1);
}
