//! Snapshots of a volume under load: the cost of one, and of thousands.
//!
//! `cargo run --release -p ramet-fs --example snapshots -- IMAGE [FILES] [SNAPSHOTS] [CHANGES]`
//!
//! A volume with FILES files of 1 to 16 KiB in directories of 100 gets SNAPSHOTS snapshots, one
//! after CHANGES changes each: files are written again, made, removed and renamed. Then half of the
//! snapshots are removed in random order, then the rest.
#![expect(clippy::unwrap_used, reason = "a measurement fails by panicking")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ramet_block::{Device, FileDevice};
use ramet_fs::{FormatOptions, Ino, Kind, NewInode, OpenOptions, ROOT_INO, RenameMode, Volume};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, RngCore, SeedableRng};

const DIR_LEN: u64 = 100;

fn open(image: &str) -> (Arc<Volume>, Duration) {
    let device = FileDevice::open(image, ramet_block::Access::ReadWrite).unwrap();
    let started = Instant::now();
    let volume = Volume::open(Arc::new(device), OpenOptions::default()).unwrap();
    (volume, started.elapsed())
}

struct Load {
    volume: Arc<Volume>,
    random: StdRng,
    dirs: Vec<Ino>,
    next: u64,
}

impl Load {
    fn dir(&mut self) -> Ino {
        self.dirs[self.random.random_range(0..self.dirs.len())]
    }

    fn bytes(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; self.random.random_range(1 << 10..16 << 10)];
        let half = bytes.len() / 2;
        self.random.fill_bytes(&mut bytes[..half]);
        bytes
    }

    fn create(&mut self, dir: Ino) {
        let name = format!("f{}", self.next);
        self.next += 1;
        let new = NewInode::new(Kind::Regular, 0o644);
        let file = self.volume.names().create(dir, name.as_bytes(), &new);
        let file = file.unwrap().ino;
        let bytes = self.bytes();
        self.volume.files().write(file, 0, &bytes, None).unwrap();
        self.volume.forget(file, 1);
    }

    fn any_name(&mut self, dir: Ino) -> Option<Vec<u8>> {
        let mut names = Vec::new();
        let each = |entry: &ramet_fs::DirEntry| {
            names.push(entry.name.to_vec());
            true
        };
        self.volume.directories().read(dir, 0, each).unwrap();
        names.retain(|name| name != b"." && name != b"..");
        (!names.is_empty()).then(|| names.swap_remove(self.random.random_range(0..names.len())))
    }

    fn change(&mut self) {
        let dir = self.dir();
        let Some(name) = self.any_name(dir) else {
            return self.create(dir);
        };
        match self.random.random_range(0..10) {
            0..6 => {
                let file = self.volume.names().lookup(dir, &name).unwrap().ino;
                let bytes = self.bytes();
                self.volume.files().write(file, 0, &bytes, None).unwrap();
                self.volume.forget(file, 1);
            }
            6..8 => self.create(dir),
            8 => self.volume.names().unlink(dir, &name).unwrap(),
            _ => {
                let to = self.dir();
                let names = self.volume.names();
                let moved = names.rename((dir, &name), (to, &name), RenameMode::Replace, None);
                moved.unwrap();
            }
        }
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Visits of nodes for a lookup of a file, on average of 1,000.
fn visits(load: &mut Load) -> f64 {
    let names: Vec<_> = (0..1000)
        .filter_map(|_| {
            let dir = load.dir();
            Some((dir, load.any_name(dir)?))
        })
        .collect();
    let before = load.volume.stats().tree.counts.node_visits;
    for (dir, name) in &names {
        let found = load.volume.names().lookup(*dir, name).unwrap().ino;
        load.volume.forget(found, 1);
    }
    let visits = load.volume.stats().tree.counts.node_visits - before;
    visits as f64 / names.len() as f64
}

fn tell(load: &mut Load, what: &str) {
    let visits = visits(load);
    let started = Instant::now();
    load.volume.checkpoint().unwrap();
    let checkpoint = started.elapsed();
    let stats = load.volume.stats().tree;
    println!(
        "{what}: height {}, {visits:.1} visits a lookup, {} MiB allocated, {} nodes, {} segments, \
         checkpoint {:.0} ms",
        stats.height,
        stats.allocated_bytes >> 20,
        stats.nodes,
        stats.segments,
        ms(checkpoint)
    );
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let image = args.first().expect("an image file");
    let number = |at: usize, default| args.get(at).map_or(default, |text| text.parse().unwrap());
    let (files, snapshots, changes) = (number(1, 20_000u64), number(2, 1000u64), number(3, 300u64));
    let file = std::fs::File::create(image).unwrap();
    file.set_len(16 << 30).unwrap();
    let device: Arc<dyn Device> =
        Arc::new(FileDevice::open(image, ramet_block::Access::ReadWrite).unwrap());
    Volume::format(&device, &FormatOptions::default()).unwrap();
    drop(device);
    let (volume, _) = open(image);
    let mut load = Load {
        volume,
        random: StdRng::seed_from_u64(1),
        dirs: Vec::new(),
        next: 0,
    };
    for number in 0..files.div_ceil(DIR_LEN) {
        let new = NewInode::new(Kind::Directory, 0o755);
        let names = load.volume.names();
        let dir = names.create(ROOT_INO, format!("d{number}").as_bytes(), &new);
        load.dirs.push(dir.unwrap().ino);
        for _ in 0..DIR_LEN {
            load.create(load.dirs[load.dirs.len() - 1]);
        }
    }
    tell(&mut load, "filled");
    let mut times = Vec::new();
    let (mut loading, mut records) = (Duration::ZERO, 0);
    for snapshot in 0..snapshots {
        let started = Instant::now();
        (0..changes).for_each(|_| load.change());
        loading += started.elapsed();
        let before = load.volume.stats().tree.seq;
        let started = Instant::now();
        load.volume
            .snapshots()
            .create(&format!("s{snapshot}"))
            .unwrap();
        times.push(started.elapsed());
        records += load.volume.stats().tree.seq - before;
        if (snapshot + 1) % (snapshots / 5).max(1) == 0 {
            tell(&mut load, &format!("{} snapshots", snapshot + 1));
        }
    }
    times.sort_unstable();
    let at = |part: f64| ms(times[((times.len() - 1) as f64 * part) as usize]);
    println!(
        "creation: median {:.3} ms, 90 % {:.3}, 99 % {:.3}, longest {:.3}; {records} records; a \
         change took {:.3} ms",
        at(0.5),
        at(0.9),
        at(0.99),
        at(1.0),
        ms(loading) / (snapshots * changes) as f64
    );
    let started = Instant::now();
    let list = load.volume.snapshots().list().unwrap();
    let listed = started.elapsed();
    let ids: Vec<u64> = list.iter().map(|entry| entry.id).collect();
    let started = Instant::now();
    let exclusive = load.volume.snapshots().exclusive_bytes(&ids, true).unwrap();
    println!(
        "list {:.1} ms, exclusive bytes of all {:.0} ms, {} KiB a snapshot",
        ms(listed),
        ms(started.elapsed()),
        exclusive.iter().sum::<u64>() / ids.len() as u64 / 1024
    );
    let Load {
        volume, mut random, ..
    } = load;
    volume.close().unwrap();
    drop(volume);
    let (volume, opening) = open(image);
    println!("opening {:.0} ms", ms(opening));
    let mut names: Vec<_> = list.into_iter().map(|entry| entry.name).collect();
    names.shuffle(&mut random);
    remove(&volume, &names);
}

fn remove(volume: &Volume, names: &[String]) {
    let half = names.len() / 2;
    for (what, part) in [
        ("half removed", &names[..half]),
        ("all removed", &names[half..]),
    ] {
        let started = Instant::now();
        for name in part {
            volume.snapshots().remove(name).unwrap();
        }
        let took = started.elapsed();
        println!("a removal {:.3} ms", ms(took) / part.len().max(1) as f64);
        for _ in 0..4 {
            volume.checkpoint().unwrap();
        }
        let stats = volume.stats().tree;
        println!(
            "{what}: {} MiB allocated, {} MiB readable, height {}, {} nodes",
            stats.allocated_bytes >> 20,
            stats.logical_bytes >> 20,
            stats.height,
            stats.nodes
        );
    }
}
