//! Space comes back: a volume that has been through a history takes hardly more of its host than a
//! fresh volume with the same contents and clones.
//!
//! `RAMET_SCALE` multiplies the sizes of the trees; with 10 and more the default shape of nodes is used.
//! `RAMET_SEED` chooses contents and places of changes.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use ramet_betree::TreeShape;
use ramet_block::Device;
use ramet_fs::{
    Caller, CloneMode, FormatOptions, Ino, Kind, NewInode, OpenOptions, ROOT_INO, Volume,
};
use ramet_sim::{HostedDevice, Rng, SparseDevice, env_u64};

const MIB: u64 = 1 << 20;
const KIB: usize = 1 << 10;

fn scale() -> u64 {
    env_u64("RAMET_SCALE", 1)
}

/// A volume on a host that counts.
struct Bed {
    host: Arc<HostedDevice<SparseDevice>>,
    volume: Arc<Volume>,
    rng: Rng,
}

fn noise(rng: &mut Rng, len: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; len.next_multiple_of(8)];
    for word in bytes.chunks_exact_mut(8) {
        word.copy_from_slice(&rng.bits().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

impl Bed {
    fn new() -> Self {
        let seed = env_u64("RAMET_SEED", 1);
        println!("RAMET_SEED={seed}");
        let host = Arc::new(HostedDevice::new(SparseDevice::new(4096 * MIB), 4096 * MIB));
        let device: Arc<dyn Device> = host.clone();
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Self::open(&host);
        Self {
            host,
            volume,
            rng: Rng::new(seed),
        }
    }

    fn open(host: &Arc<HostedDevice<SparseDevice>>) -> Arc<Volume> {
        let small = TreeShape {
            leaf_bytes: 128 * KIB,
            block_bytes: 16 * KIB,
            fanout: 16,
            buffer_bytes: 256 * KIB,
            memory_bytes: 512 * KIB,
            ..TreeShape::default()
        };
        let options = OpenOptions {
            shape: (scale() < 10).then_some(small),
            manual: true,
            ..OpenOptions::default()
        };
        Volume::open(host.clone(), options).unwrap()
    }

    fn dir(&self, parent: Ino, name: &str) -> Ino {
        let new = NewInode::new(Kind::Directory, 0o755);
        let made = self.volume.names().create(parent, name.as_bytes(), &new);
        made.unwrap().ino
    }

    fn at(&self, path: &str) -> Ino {
        path.split('/').fold(ROOT_INO, |dir, name| {
            self.volume
                .names()
                .lookup(dir, name.as_bytes())
                .unwrap()
                .ino
        })
    }

    fn file(&mut self, parent: Ino, name: &str, len: usize) -> Ino {
        let new = NewInode::new(Kind::Regular, 0o644);
        let made = self.volume.names().create(parent, name.as_bytes(), &new);
        let file = made.unwrap().ino;
        let bytes = noise(&mut self.rng, len);
        self.volume.files().write(file, 0, &bytes, None).unwrap();
        file
    }

    /// A directory of `count` files of `len` bytes.
    fn tree(&mut self, parent: Ino, name: &str, count: u64, len: usize) -> Ino {
        let dir = self.dir(parent, name);
        for number in 0..count {
            self.file(dir, &format!("f{number:05}"), len);
        }
        dir
    }

    fn clone_of(&self, source: &str, dir: Ino, name: &str) {
        let (caller, source) = (Caller::root(), self.at(source));
        let trees = self.volume.trees();
        let made = trees.clone_entry(&caller, source, dir, name.as_bytes(), CloneMode::New);
        made.unwrap();
    }

    fn remove(&self, dir: Ino, name: &str) {
        let trees = self.volume.trees();
        let gone = trees.remove_tree(&Caller::root(), dir, name.as_bytes());
        gone.unwrap();
    }

    fn checkpoint(&self) {
        self.volume.forget_all();
        self.volume.checkpoint().unwrap();
    }

    /// Bytes on the host after all work of an idle volume.
    fn settled_bytes(&self, what: &str) -> u64 {
        self.volume.forget_all();
        let mut steps = 0;
        while self.volume.reclaim_space().unwrap() {
            steps += 1;
            assert!(steps < 100_000, "the work of an idle volume ends");
        }
        let stats = self.volume.tree().stats();
        let host = self.host.allocated_bytes();
        println!(
            "{what}: {} KiB on the host, {} KiB allocated, logical {} KiB, {steps} steps",
            host >> 10,
            stats.allocated_bytes >> 10,
            stats.logical_bytes >> 10
        );
        assert_eq!(self.volume.controls().check().unwrap(), []);
        host
    }
}

/// The host of `used` gives hardly more than that of `fresh`.
fn assert_alike(used: u64, fresh: u64) {
    let most = fresh + fresh * 15 / 100 + MIB;
    assert!(used <= most, "{used} bytes, {fresh} of a fresh volume");
}

#[test]
fn an_emptied_volume_is_as_small_as_a_fresh_one() {
    let mut bed = Bed::new();
    for number in 0..4 {
        bed.tree(ROOT_INO, &format!("t{number}"), 100 * scale(), 40_000);
        bed.checkpoint();
    }
    bed.settled_bytes("full");
    (0..4).for_each(|number| bed.remove(ROOT_INO, &format!("t{number}")));
    let used = bed.settled_bytes("emptied");
    let fresh = Bed::new().settled_bytes("fresh");
    assert!(used <= fresh + MIB, "{used} bytes, {fresh} of a fresh one");
}

#[test]
fn stepwise_deletes_leave_nothing_on_the_host() {
    let mut bed = Bed::new();
    for number in 0..40 {
        bed.tree(ROOT_INO, &format!("t{number}"), 10 * scale(), 100_000);
    }
    bed.settled_bytes("full");
    for number in 0..36 {
        bed.remove(ROOT_INO, &format!("t{number}"));
        bed.checkpoint();
    }
    let used = bed.settled_bytes("a tenth left");
    let mut fresh = Bed::new();
    for number in 36..40 {
        fresh.tree(ROOT_INO, &format!("t{number}"), 10 * scale(), 100_000);
    }
    assert_alike(used, fresh.settled_bytes("fresh"));
}

#[test]
fn a_hundred_rounds_of_clone_edit_and_delete_leave_nothing() {
    let mut bed = Bed::new();
    bed.tree(ROOT_INO, "source", 100 * scale(), 40_000);
    bed.checkpoint();
    for round in 0..100 {
        let name = format!("r{round}");
        bed.clone_of("source", ROOT_INO, &name);
        for _ in 0..10 {
            let number = bed.rng.below(100);
            let file = bed.at(&format!("{name}/f{number:05}"));
            let bytes = noise(&mut bed.rng, 9000);
            let at = bed.rng.below(30_000) as u64;
            bed.volume.files().write(file, at, &bytes, None).unwrap();
        }
        if round >= 3 {
            bed.remove(ROOT_INO, &format!("r{}", round - 3));
        }
        if round % 3 == 0 {
            bed.checkpoint();
        }
    }
    (97..100).for_each(|round| bed.remove(ROOT_INO, &format!("r{round}")));
    let used = bed.settled_bytes("after a hundred rounds");
    let mut fresh = Bed::new();
    fresh.tree(ROOT_INO, "source", 100 * scale(), 40_000);
    assert_alike(used, fresh.settled_bytes("fresh"));
}
