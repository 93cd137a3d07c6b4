//! Clones of shadowing trees against copies of `BTreeMap`. A tree alone is tested where it stands, in
//! `crates/nodetable/src/model.rs`.
//!
//! Small page capacities make high trees of few entries, so that splits, merges, borrowing, growing
//! and collapsing roots all happen, in shared and in private pages. After commits all trees
//! are compared; now and then the forest is opened again from its roots. At the end all space is
//! free again. `RAMET_SEED` and `RAMET_STEPS` replay or lengthen a run.

use std::collections::BTreeMap;
use std::sync::Arc;

use ramet_block::{Device, Extent, MemDevice, PageRef};
use ramet_nodetable::pages::{Shape, Structure};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::forest::{Forest, Tree, clone_tree, delete_tree};

const USABLE: Extent = Extent::new(1 << 20, 255 << 20);
const CACHE_BYTES: u64 = 100 << 20;
const SHAPE: Shape = Shape {
    capacity_bytes: 704,
    ..Shape::new(Structure::NodeTable, 4096)
};

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// One of 600 keys, between 2 and 64 bytes long.
fn key(rng: &mut StdRng) -> Vec<u8> {
    let n: u16 = rng.random_range(0..600);
    n.to_be_bytes().repeat(1 + usize::from(n % 32))
}

fn value(rng: &mut StdRng) -> Vec<u8> {
    let longest = SHAPE.value_max();
    let len = [rng.random_range(0..40), longest][usize::from(rng.random_bool(0.2))];
    vec![rng.random(); len]
}

fn assert_same(tree: &Tree, model: &Model) {
    let entries = tree.range(&[]).map(|entry| entry.unwrap());
    let found: Vec<_> = entries.map(|(k, v)| (k.into_vec(), v.into_vec())).collect();
    let want: Vec<_> = model.clone().into_iter().collect();
    assert_eq!(found, want);
}

struct World {
    device: Arc<dyn Device>,
    forest: Forest,
    live: Vec<(Tree, Model)>,
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
        let mut trees: Vec<&mut Tree> = self.live.iter_mut().map(|(tree, _)| tree).collect();
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
                let (tree, model) = &mut self.live[at];
                let clone = (clone_tree(tree).unwrap(), model.clone());
                self.live.push(clone);
            }
            3 if self.live.len() > clones / 2 => {
                delete_tree(self.live.swap_remove(at).0).unwrap();
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
    let seed = setting("RAMET_SEED").unwrap_or(1);
    let steps = setting("RAMET_STEPS").unwrap_or(60_000);
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
        delete_tree(world.live.swap_remove(at).0).unwrap();
        if world.live.len().is_multiple_of(50) {
            world.commit(rng.random_bool(0.5), false);
        }
    }
    world.commit(false, false);
    // The map itself may take another page or none less than at first.
    assert_eq!(world.forest.free_bytes(), free_at_first);
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
        let mut clone = clone_tree(&mut world.live[0].0).unwrap();
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
        delete_tree(clone).unwrap();
    }
    world.commit(false, false);
    assert_eq!(world.forest.free_bytes(), free);
}
