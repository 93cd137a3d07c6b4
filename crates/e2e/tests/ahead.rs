//! Files whose contents the kernel gets before a read, while they change: readers see written bytes
//! only.
//!
//! `RAMET_ROUNDS` sets how often each writer writes. The kernel is made to forget all that is not
//! in use, again and again.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ramet_e2e::{Bed, number, seeded};
use ramet_sys::write_mapped;
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};

/// Words of this many bytes hold the number of the write that put them there.
const WORD: usize = 8;

/// A file that one thread writes and all read: each of its words is the number of the write that
/// put it there.
struct Versioned {
    path: PathBuf,
    /// Number of the last write that is done, and of the last that began.
    done: AtomicU64,
    begun: AtomicU64,
}

impl Versioned {
    fn write(&self, rng: &mut StdRng) {
        let version = self.begun.load(Ordering::SeqCst) + 1;
        self.begun.store(version, Ordering::SeqCst);
        let words = |count: usize| version.to_le_bytes().repeat(count);
        let open = || OpenOptions::new().read(true).write(true).open(&self.path);
        let mut how = OpenOptions::new();
        let len = fs::metadata(&self.path).unwrap().len();
        let count = usize::try_from(len).unwrap() / WORD;
        match rng.random_range(0..5) {
            0 => open().unwrap().write_all_at(&words(count), 0).unwrap(),
            1 => fs::write(&self.path, words(rng.random_range(1..1_200))).unwrap(),
            2 => {
                // First shorter, then with its new contents.
                let file = open().unwrap();
                file.set_len(8).unwrap();
                let count = rng.random_range(1..600);
                file.write_all_at(&words(count), 0).unwrap();
            }
            3 => {
                const DIRECT: i32 = 0o40_000;
                let file = how.write(true).custom_flags(DIRECT).open(&self.path);
                file.unwrap().write_all_at(&words(count), 0).unwrap();
            }
            _ => {
                let file = open().unwrap();
                for page in words(count).chunks(4096).enumerate() {
                    write_mapped(&file, 4096 * page.0 as u64, page.1).unwrap();
                }
            }
        }
        self.done.store(version, Ordering::SeqCst);
    }

    /// Every word that can be read was written, and none is older than a write that was done
    /// before.
    fn check(&self) {
        let least = self.done.load(Ordering::SeqCst);
        let mut bytes = Vec::new();
        File::open(&self.path)
            .unwrap()
            .read_to_end(&mut bytes)
            .unwrap();
        let most = self.begun.load(Ordering::SeqCst);
        assert_eq!(bytes.len() % WORD, 0, "{:?}", self.path);
        for word in bytes.chunks_exact(WORD) {
            let version = u64::from_le_bytes(word.try_into().unwrap());
            // On all file systems, a read while a file gets shorter may see zeros in the place of
            // the bytes that go.
            let is_cut = version == 0 && least < most;
            assert!(
                is_cut || (least..=most).contains(&version),
                "{:?}: {version} is none of {least} to {most}",
                self.path
            );
        }
    }
}

const DIRS: usize = 4;
const FILES: usize = 40;
const WRITERS: usize = 2;

/// Files are read in order, written in all ways, and forgotten by the kernel, all at the same time,
/// until each writer has written so often.
fn storm(dirs: &[Vec<Versioned>], seed: u64, rounds: u64) {
    let rng = |of: u64| StdRng::seed_from_u64(seed ^ of << 32);
    let is_over = AtomicBool::new(false);
    let read = |mut rng: StdRng| {
        while !is_over.load(Ordering::SeqCst) {
            let dir = &dirs[rng.random_range(0..DIRS)];
            let path = dir[0].path.parent().unwrap();
            assert_eq!(fs::read_dir(path).unwrap().count(), FILES);
            let skipped = rng.random_range(0..3);
            dir.iter().skip(skipped).for_each(Versioned::check);
        }
    };
    let write = |mut rng: StdRng, writer: usize| {
        for _ in 0..rounds {
            let dir = &dirs[rng.random_range(0..DIRS)];
            let file = &dir[rng.random_range(0..FILES / WRITERS) * WRITERS + writer];
            file.write(&mut rng);
            file.check();
        }
    };
    // The kernel forgets only pages and inodes that nobody uses.
    let forget = || {
        while !is_over.load(Ordering::SeqCst) {
            fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
            std::thread::sleep(Duration::from_millis(3));
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(forget);
        for reader in 0..3 {
            scope.spawn(move || read(rng(100 + reader)));
        }
        let start = |writer| scope.spawn(move || write(rng(writer as u64), writer));
        let writers: Vec<_> = (0..WRITERS).map(start).collect();
        let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        is_over.store(true, Ordering::SeqCst);
        ended.into_iter().for_each(|ended| ended.unwrap());
    });
}

#[test]
fn nobody_sees_overwritten_bytes() {
    let mut seed = seeded("ahead");
    let rounds = number("RAMET_ROUNDS", 3_000);
    for options in ["defaults", "no_io_uring"] {
        let bed = Bed::new("1G");
        let mount = bed.mount(&["-o", options]);
        let file = |dir: &PathBuf, file| Versioned {
            path: dir.join(format!("{file:03}")),
            done: AtomicU64::new(1),
            begun: AtomicU64::new(1),
        };
        let dirs = (0..DIRS).map(|dir| {
            let dir = mount.root().join(dir.to_string());
            fs::create_dir(&dir).unwrap();
            (0..FILES).map(|number| file(&dir, number)).collect()
        });
        let dirs: Vec<Vec<_>> = dirs.collect();
        let all = || dirs.iter().flatten();
        for file in all() {
            fs::write(&file.path, 1_u64.to_le_bytes().repeat(50)).unwrap();
        }
        let sent = || {
            let counts = &mount.stat()["prefetch"];
            println!("{options}: {counts}");
            counts["sent_files"].as_u64().unwrap()
        };
        for storms in 0.. {
            assert!(storms < 20, "nothing is sent");
            storm(&dirs, seed.next_u64(), rounds);
            if sent() > 100 {
                break;
            }
        }
        all().for_each(Versioned::check);
        mount.umount();
        let mount = bed.mount(&[]);
        all().for_each(Versioned::check);
        mount.umount();
        bed.fsck();
    }
}
