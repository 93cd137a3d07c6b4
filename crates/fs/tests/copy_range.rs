//! Ranges that are copied from file to file at random offsets, beside files in memory.
//!
//! `RAMET_SEED` is the seed, `RAMET_STEPS` the number of steps.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use common::{make, open, variable, volume};
use ramet_block::Device;
use ramet_fs::{Ino, Kind, ROOT_INO, SetAttr, Volume};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};

const BLOCK: u64 = 4096;
const MIB: u64 = 1 << 20;
/// Greatest size of a file.
const FILE_BYTES: u64 = 6 * MIB;

fn noise(random: &mut StdRng, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    random.fill_bytes(&mut bytes);
    bytes
}

struct Files {
    device: Arc<dyn Device>,
    volume: Arc<Volume>,
    inos: Vec<Ino>,
    contents: Vec<Vec<u8>>,
    random: StdRng,
}

impl Files {
    fn new(seed: u64) -> Self {
        let (device, volume) = volume();
        let name = |number: &u32| format!("f{number}");
        let inos = (0..3).map(|number| make(&volume, ROOT_INO, &name(&number), Kind::Regular).ino);
        Self {
            inos: inos.collect(),
            device,
            volume,
            contents: vec![Vec::new(); 3],
            random: StdRng::seed_from_u64(seed),
        }
    }

    /// An offset: any, of a block, of a MiB, or of the second chunk of the maps.
    fn offset(&mut self) -> u64 {
        let at = self.random.random_range(0..FILE_BYTES);
        match self.random.random_range(0..8) {
            0 => at,
            1..5 => at / BLOCK * BLOCK,
            _ => at / MIB * MIB,
        }
    }

    fn step(&mut self) {
        let file = self.random.random_range(0..3);
        let offset = self.offset();
        match self.random.random_range(0..20) {
            0..5 => self.write(file, offset),
            5 => self.punch(file, offset),
            6 => self.resize(file, offset),
            7 => self.reopen(),
            _ => self.copy(file, offset),
        }
        self.compare(file);
    }

    fn write(&mut self, file: usize, offset: u64) {
        let most = [100, 40_000, MIB][self.random.random_range(0..3)];
        let len = self.random.random_range(1..most).min(FILE_BYTES - offset);
        let bytes = noise(&mut self.random, len);
        let written = self
            .volume
            .files()
            .write(self.inos[file], offset, &bytes, None);
        written.unwrap();
        let contents = &mut self.contents[file];
        contents.resize(contents.len().max((offset + len) as usize), 0);
        contents[offset as usize..][..len as usize].copy_from_slice(&bytes);
    }

    fn punch(&mut self, file: usize, offset: u64) {
        let len = self.random.random_range(1..2 * MIB);
        self.volume
            .files()
            .zero_range(self.inos[file], offset, len, true, None)
            .unwrap();
        let contents = &mut self.contents[file];
        let first = contents.len().min(offset as usize);
        let last = contents.len().min((offset + len) as usize);
        contents[first..last].fill(0);
    }

    fn resize(&mut self, file: usize, size: u64) {
        let set = SetAttr {
            size_bytes: Some(size),
            ..SetAttr::default()
        };
        self.volume
            .attributes()
            .setattr(self.inos[file], &set, None)
            .unwrap();
        self.contents[file].resize(size as usize, 0);
    }

    fn reopen(&mut self) {
        self.volume.checkpoint().unwrap();
        let name = |number: u32| format!("f{number}");
        self.volume = open(&self.device);
        let ino = |number| {
            self.volume
                .names()
                .lookup(ROOT_INO, name(number).as_bytes())
        };
        self.inos = (0..3).map(|number| ino(number).unwrap().ino).collect();
    }

    /// Copies as copy_file_range(2) is called: again until the end. The distance is that of blocks
    /// or of MiB as a rule.
    fn copy(&mut self, file: usize, mut to: u64) {
        let source = self.random.random_range(0..3);
        let distance = match self.random.random_range(0..8) {
            0 => self.random.random_range(0..FILE_BYTES),
            1..3 => self.random.random_range(0..FILE_BYTES) / BLOCK * BLOCK,
            _ => self.random.random_range(0..6) * MIB,
        };
        let Some(mut from) = to.checked_sub(distance) else {
            return;
        };
        if self.random.random() {
            (from, to) = (to, from);
        }
        let mut len = self.random.random_range(1..4 * MIB);
        if self.random.random() {
            len = len / BLOCK * BLOCK;
        }
        len = len.min(FILE_BYTES - to);
        if source == file {
            len = len.min(from.abs_diff(to));
        }
        let bytes = self.contents[source]
            .get(from as usize..)
            .unwrap_or_default();
        let bytes = bytes[..bytes.len().min(len as usize)].to_vec();
        let (mut done, len) = (0, bytes.len() as u64);
        while done < len {
            let ends = (
                (self.inos[source], from + done),
                (self.inos[file], to + done),
            );
            let copied = self
                .volume
                .files()
                .copy_range(ends.0, ends.1, len - done, None);
            done += copied.unwrap().bytes;
        }
        assert_eq!(done, len);
        if bytes.is_empty() {
            return;
        }
        let contents = &mut self.contents[file];
        contents.resize(contents.len().max(to as usize + bytes.len()), 0);
        contents[to as usize..][..bytes.len()].copy_from_slice(&bytes);
    }

    fn compare(&self, file: usize) {
        let read = self
            .volume
            .files()
            .read(self.inos[file], 0, FILE_BYTES as u32 + 1);
        let (read, contents) = (read.unwrap(), &self.contents[file]);
        assert_eq!(read.len(), contents.len());
        let differs = read.iter().zip(contents).position(|(a, b)| a != b);
        assert_eq!(differs, None, "a byte of file {file}");
    }
}

#[test]
fn copied_ranges_are_those_of_files_in_memory() {
    let first = variable("RAMET_SEED").unwrap_or(1);
    let steps = variable("RAMET_STEPS").unwrap_or(1_200);
    for seed in first..first + steps.div_ceil(100) {
        println!("RAMET_SEED={seed}");
        let mut files = Files::new(seed);
        for step in 0..100 {
            files.step();
            if step % 20 == 19 {
                assert_eq!(files.volume.controls().check().unwrap(), []);
            }
        }
    }
}

/// 64 copies of 8 MiB that do not compress, each at another MiB, in a volume of 64 MiB: by clones
/// alone there is room.
#[test]
fn copies_at_any_distance_of_blocks_share_them() {
    /// From a copy to the next.
    const STEP: u64 = 9 * MIB + 3 * BLOCK;
    let (_, volume) = volume();
    let mut random = StdRng::seed_from_u64(7);
    let source = make(&volume, ROOT_INO, "source", Kind::Regular).ino;
    let bytes = noise(&mut random, 8 * MIB + 5 * BLOCK);
    volume.files().write(source, 0, &bytes, None).unwrap();
    let target = make(&volume, ROOT_INO, "target", Kind::Regular).ino;
    for number in 0..64 {
        let (to, len) = (number * STEP, bytes.len() as u64);
        let copied = volume
            .files()
            .copy_range((source, 0), (target, to), len, None);
        assert_eq!(copied.unwrap().bytes, len);
    }
    for number in [0, 1, 31, 63] {
        let len = u32::try_from(bytes.len()).unwrap();
        let read = volume.files().read(target, number * STEP, len).unwrap();
        assert!(read == bytes, "copy {number}");
    }
    assert_eq!(volume.controls().check().unwrap(), []);
}
