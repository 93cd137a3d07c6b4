//! The daemon and `ramet fsck` stay within their memory budget plus 64 MiB.
//!
//! `RAMET_LIMITS_MIB` are the budgets (default `64`), `RAMET_FILES` small files are made (5,000),
//! each of 300 writers writes `RAMET_WRITER_KIB` in pieces of 4 KiB (1,024), a large file has
//! `RAMET_FILE_MIB` (64), and `RAMET_CLONES` clones are made (20). With `RAMET_RINGS=1` requests come
//! through io_uring as well, which switches it on for the machine.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use ramet_e2e::{Bed, Mount, number, ramet_bin, run_ok, seeded};
use rand::RngCore;

const WRITERS: u64 = 300;
const PIECE_BYTES: usize = 4096;
const MIB: u64 = 1 << 20;
/// Memory that may lie above the budget.
const ABOVE: u64 = 64 * MIB;

fn limits() -> Vec<u64> {
    let list = std::env::var("RAMET_LIMITS_MIB").unwrap_or_else(|_| "64".into());
    let limits = list
        .split(',')
        .map(|mib| mib.parse().expect("a number of MiB"));
    limits.collect()
}

fn transports() -> Vec<&'static str> {
    let rings = (number("RAMET_RINGS", 0) > 0).then_some("io_uring");
    ["no_io_uring"].into_iter().chain(rings).collect()
}

/// Mounts a new volume for each budget and transport, has `work` use it, and checks the memory of
/// the daemon. The volume is checked too, within the same budget, if `checks` says so.
fn within_the_budget(what: &str, checks: bool, work: impl Fn(&Mount)) {
    for (limit, transport) in limits()
        .iter()
        .flat_map(|l| transports().into_iter().map(move |t| (*l, t)))
    {
        let bed = Bed::new("16G");
        let mount = bed.mount(&["--memory", &format!("{limit}M"), "-o", transport]);
        let idle = mount.memory("VmHWM");
        work(&mount);
        let most = mount.memory("VmHWM");
        let now = mount.memory("RssAnon");
        println!(
            "{what}, {limit} MiB, {transport}: idle {}, at most {}, now {} MiB",
            idle / MIB,
            most / MIB,
            now / MIB
        );
        let stat = mount.stat();
        let memory: Vec<_> = stat.as_object().expect("keys").iter().collect();
        let memory = memory
            .iter()
            .filter(|(key, _)| key.starts_with("memory_") || key.contains("inodes"));
        assert!(
            most <= limit * MIB + ABOVE,
            "{what}, {limit} MiB, {transport}: the daemon held {} MiB: {:?}",
            most / MIB,
            memory.collect::<Vec<_>>()
        );
        mount.umount();
        if checks {
            let most = fsck_memory(&bed.volume(), limit);
            println!("{what}, {limit} MiB: fsck at most {} MiB", most / MIB);
            assert!(most <= limit * MIB + ABOVE, "fsck held {} MiB", most / MIB);
        }
    }
}

/// Checks a volume; the most memory that this took, as far as was seen.
fn fsck_memory(volume: &Path, limit_mib: u64) -> u64 {
    let limit = format!("{limit_mib}M");
    let args = [
        "fsck".as_ref(),
        "--memory".as_ref(),
        OsStr::new(&limit),
        volume.as_ref(),
    ];
    let mut check = Command::new(ramet_bin());
    check.args(args).stdout(Stdio::null());
    let mut check = check.spawn().expect("ramet runs");
    let status = format!("/proc/{}/status", check.id());
    let mut most = 0;
    let ended = loop {
        let told = std::fs::read_to_string(&status).unwrap_or_default();
        let line = told.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        most = most.max(kib.unwrap_or(0) * 1024);
        if let Some(ended) = check.try_wait().expect("it is our child") {
            break ended;
        }
        std::thread::yield_now();
    };
    assert!(ended.success(), "fsck: {ended}");
    most
}

#[test]
fn memory_stays_within_the_budget_with_300_writers() {
    let bytes = number("RAMET_WRITER_KIB", 1024) as usize * 1024;
    within_the_budget("300 writers", false, |mount| {
        std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                let path = mount.root().join(format!("file{writer}"));
                scope.spawn(move || {
                    let mut piece = vec![0; PIECE_BYTES];
                    rand::rng().fill_bytes(&mut piece);
                    let mut file = File::create(path).expect("the mount is writable");
                    for number in 0..bytes / PIECE_BYTES {
                        piece[..8].copy_from_slice(&number.to_le_bytes());
                        file.write_all(&piece).expect("there is room");
                    }
                });
            }
        });
    });
}

#[test]
fn memory_stays_within_the_budget_with_many_small_files() {
    let files = number("RAMET_FILES", 5_000);
    within_the_budget("small files", true, |mount| {
        for number in 0..files {
            let dir = mount.root().join(format!("dir{}", number / 1000));
            if number % 1000 == 0 {
                std::fs::create_dir(&dir).expect("it is new");
            }
            std::fs::write(dir.join(format!("file{number}")), [7; 100]).expect("there is room");
        }
        let created = mount.memory("VmHWM");
        let found = run_ok(
            "find",
            &[mount.root().to_str().expect("UTF-8"), "-size", "1"],
        );
        assert_eq!(found.lines().count() as u64, files);
        println!("{files} files: created within {} MiB", created / MIB);
        run_ok(
            ramet_bin(),
            &["scrub", "--fast", mount.root().to_str().expect("UTF-8")],
        );
    });
}

#[test]
fn memory_stays_within_the_budget_with_clones_and_a_large_file() {
    let (clones, mib) = (number("RAMET_CLONES", 20), number("RAMET_FILE_MIB", 64));
    let seed = seeded("memory").next_u64();
    within_the_budget("clones and a large file", true, |mount| {
        let source = mount.root().join("source");
        std::fs::create_dir(&source).expect("it is new");
        for number in 0..100_u64 {
            std::fs::write(source.join(number.to_string()), number.to_le_bytes()).expect("room");
        }
        for number in 0..clones {
            mount.clone_path(&source, &mount.root().join(format!("clone{number}")));
        }
        let path = mount.root().join("large");
        let mut rng = seeded_by(seed);
        let mut part = vec![0; MIB as usize];
        let mut file = File::create(&path).expect("it is new");
        for _ in 0..mib {
            rng.fill_bytes(&mut part);
            file.write_all(&part).expect("there is room");
        }
        drop(file);
        run_ok(
            ramet_bin(),
            &[
                "sync",
                "--checkpoint",
                mount.root().to_str().expect("UTF-8"),
            ],
        );
        std::fs::write("/proc/sys/vm/drop_caches", "3").expect("tests run as root");
        let mut rng = seeded_by(seed);
        let mut file = File::open(&path).expect("it is there");
        let (mut found, mut expected) = (part.clone(), part);
        for number in 0..mib {
            rng.fill_bytes(&mut expected);
            file.read_exact(&mut found).expect("it was written");
            assert!(found == expected, "MiB {number} differs");
        }
    });
}

fn seeded_by(seed: u64) -> rand::rngs::StdRng {
    rand::SeedableRng::seed_from_u64(seed)
}
