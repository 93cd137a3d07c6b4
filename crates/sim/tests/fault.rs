//! Calls of the device fail, one after the other, once and from then on: see [`FaultRun`]. And with
//! background threads: one write or sync fails, the device works again at once, and they go on.
//! Nothing may be acknowledged any more, and the device must still hold the tree. The same holds
//! when a call of the device panics, in any thread.
//!
//! `RAMET_SEED` and `RAMET_SEEDS` choose the histories.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use ramet_betree::{Batch, Error, OpenOptions, Tree};
use ramet_block::Device;
use ramet_sim::{FaultReport, FaultRun, Rng, Setup, SparseDevice, env_u64, for_seeds};

/// Fails the change or sync whose number is in `fail_at`, once.
struct FailsOnce {
    device: Arc<SparseDevice>,
    count: AtomicU64,
    fail_at: u64,
}

impl FailsOnce {
    fn count(&self) -> io::Result<()> {
        if self.count.fetch_add(1, Ordering::Relaxed) == self.fail_at {
            return Err(io::Error::other("injected"));
        }
        Ok(())
    }
}

impl Device for FailsOnce {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }
    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.device.read_at(addr, buf)
    }
    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        // The bytes that a failed write leaves are unknown: here all of it.
        self.device.write_at(addr, buf)?;
        self.count()
    }
    fn sync(&self) -> io::Result<()> {
        self.count()
    }
    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.device.discard(addr, len_bytes)
    }
}

fn key(number: usize) -> Bytes {
    format!("{number:06}").into_bytes().into()
}

/// Writes rounds of values until the device fails; returns the last round acknowledged and begun.
fn work(tree: &Tree, rng: &mut Rng, rounds: u64) -> (u64, u64) {
    let mut acknowledged = 0;
    for round in 1..=rounds {
        let mut batch = Batch::new();
        batch.put(&b"round"[..], round.to_le_bytes().to_vec());
        for _ in 0..12 {
            batch.put(key(rng.below(300)), vec![round as u8; 1 + rng.below(200)]);
        }
        match tree.apply(batch) {
            Ok(_) => {}
            Err(Error::Io { .. } | Error::Poisoned(_)) => return (acknowledged, round),
            Err(error) => panic!("apply: {error}"),
        }
        let done = match rng.below(6) {
            0 => tree.checkpoint(),
            1..3 => tree.sync(),
            _ => continue,
        };
        match done {
            Ok(()) => acknowledged = round,
            Err(Error::Io { .. } | Error::Poisoned(_)) => {
                assert!(
                    matches!(tree.sync(), Err(Error::Poisoned(_))),
                    "a later sync does not pretend"
                );
                assert!(matches!(tree.checkpoint(), Err(Error::Poisoned(_))));
                return (acknowledged, round);
            }
            Err(error) => panic!("sync: {error}"),
        }
    }
    (acknowledged, rounds)
}

fn round_of(tree: &Tree) -> u64 {
    let value = tree.get(b"round").expect("get");
    value.map_or(0, |v| {
        u64::from_le_bytes(v[..].try_into().expect("eight bytes"))
    })
}

#[test]
fn a_failure_ends_writing_and_loses_nothing_acknowledged() {
    let setup = Setup {
        device_bytes: 6 << 20,
        ..Setup::tiny_nodes()
    };
    let mut failures = 0;
    for fail_at in 0..env_u64("RAMET_FAULTS", 250) {
        let manual = fail_at % 2 == 0;
        let device = Arc::new(SparseDevice::new(setup.device_bytes));
        let plain: Arc<dyn Device> = device.clone();
        Tree::format(&plain, &setup.format).expect("format");
        let fails: Arc<dyn Device> = Arc::new(FailsOnce {
            device: device.clone(),
            count: AtomicU64::new(0),
            fail_at,
        });
        let options = OpenOptions {
            manual,
            ..setup.open.clone()
        };
        let mut rng = Rng::new(fail_at);
        let (acknowledged, begun) = match Tree::open(fails, options) {
            Ok(tree) => {
                let (acknowledged, begun) = work(&tree, &mut rng, 60);
                failures += u64::from(tree.stats().poisoned.is_some());
                let _snapshot = tree.snapshot();
                drop(tree);
                (acknowledged, begun)
            }
            Err(_) => (0, 0),
        };
        let tree = Tree::open(plain, setup.open.clone()).expect("open after a failure");
        let violations = tree.verify(&mut |_| {}).expect("verify");
        assert!(violations.is_empty(), "fault {fail_at}: {violations:?}");
        let round = round_of(&tree);
        assert!(
            (acknowledged..=begun).contains(&round),
            "fault {fail_at}: round {round}, acknowledged {acknowledged}, begun {begun}"
        );
        assert!(tree.scan(b"", None).all(|entry| entry.is_ok()));
    }
    println!("{failures} failures met");
    assert!(failures > 100);
}

#[test]
fn any_call_that_fails_is_an_error_or_a_clean_stop() {
    let first = env_u64("RAMET_SEED", 1);
    let end = first + env_u64("RAMET_SEEDS", 6);
    let total = Mutex::new((0, FaultReport::default()));
    for_seeds(
        first,
        |seed| seed < end,
        |seed| {
            let setup = Setup::tight_of(seed, 64 << 10);
            let run = FaultRun::new(&setup, seed, 40, 60).unwrap_or_else(|e| panic!("{e}"));
            let mut report = FaultReport::default();
            for call in 0..run.calls() {
                report.add(&run.fail(call).unwrap_or_else(|e| panic!("{e}")));
            }
            let mut total = total.lock().expect("no panic holds it");
            total.0 += run.calls();
            total.1.add(&report);
        },
    );
    let (calls, report) = total.into_inner().expect("no panic holds it");
    println!("{calls} calls, each once and from then on: {report:?}");
    assert!(report.runs == 2 * calls && report.stopped > 0 && report.went_on > 0);
    assert!(report.unopened > 0);
}

/// From when it is armed on, panics in the call with this number of threads whose names begin so.
struct Panics {
    device: Arc<SparseDevice>,
    thread: &'static str,
    at: u64,
    is_armed: AtomicBool,
    count: AtomicU64,
}

impl Panics {
    fn new(device: &Arc<SparseDevice>, thread: &'static str, at: u64) -> Arc<Self> {
        Arc::new(Self {
            device: device.clone(),
            thread,
            at,
            is_armed: AtomicBool::new(false),
            count: AtomicU64::new(0),
        })
    }

    fn count(&self) {
        let is_meant = thread::current()
            .name()
            .is_some_and(|name| name.starts_with(self.thread));
        if is_meant && self.is_armed.load(Ordering::Relaxed) {
            let number = self.count.fetch_add(1, Ordering::Relaxed);
            assert!(number != self.at, "injected");
        }
    }

    fn has_panicked(&self) -> bool {
        self.count.load(Ordering::Relaxed) > self.at
    }
}

impl Device for Panics {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }
    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.count();
        self.device.read_at(addr, buf)
    }
    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.count();
        self.device.write_at(addr, buf)
    }
    fn sync(&self) -> io::Result<()> {
        self.count();
        self.device.sync()
    }
    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.count();
        self.device.discard(addr, len_bytes)
    }
}

fn put_round(tree: &Tree, round: u8) -> ramet_betree::Result<()> {
    let mut batch = Batch::new();
    for number in 0..100 {
        batch.put(key(number * usize::from(round)), vec![round; 100]);
    }
    tree.apply(batch).map(drop)
}

/// Opened again, the volume is as it was after `rounds`.
fn holds(device: Arc<SparseDevice>, setup: &Setup, rounds: u8) {
    let tree = Tree::open(device, setup.open.clone()).expect("open after a panic");
    let violations = tree.verify(&mut |_| {}).expect("verify");
    assert!(violations.is_empty(), "{violations:?}");
    for number in 0..100 * usize::from(rounds) {
        let is_of = |round: &u8| {
            number.is_multiple_of(usize::from(*round)) && number / usize::from(*round) < 100
        };
        let last = (1..=rounds).rev().find(is_of);
        let found = tree.get(&key(number)).expect("get");
        assert_eq!(found.map(|value| value[0]), last, "{number}");
    }
}

#[test]
fn no_checkpoint_follows_one_that_panicked() {
    let setup = Setup::tiny_nodes();
    for at in 0.. {
        let device = Arc::new(SparseDevice::new(setup.device_bytes));
        let plain: Arc<dyn Device> = device.clone();
        Tree::format(&plain, &setup.format).expect("format");
        let panics = Panics::new(&device, "", at);
        let options = OpenOptions {
            manual: true,
            ..setup.open.clone()
        };
        let tree = Tree::open(panics.clone(), options).expect("open");
        put_round(&tree, 1).expect("apply");
        tree.checkpoint().expect("checkpoint");
        put_round(&tree, 2).expect("apply");
        tree.sync().expect("sync");
        panics.is_armed.store(true, Ordering::Relaxed);
        let done = catch_unwind(AssertUnwindSafe(|| tree.checkpoint()));
        if !panics.has_panicked() {
            println!("{at} calls");
            assert!(at > 20, "each was met");
            return;
        }
        assert!(done.is_err(), "call {at}");
        for _ in 0..2 {
            let refused = [tree.checkpoint(), tree.sync(), put_round(&tree, 3)];
            for done in refused {
                assert!(
                    matches!(done, Err(Error::Poisoned(_))),
                    "call {at}: {done:?}"
                );
            }
        }
        drop(tree);
        holds(device, &setup, 2);
    }
}

#[test]
fn a_background_thread_that_panics_ends_writing() {
    let setup = Setup::tiny_nodes();
    for name in ["ramet-flush", "ramet-keep"] {
        let device = Arc::new(SparseDevice::new(setup.device_bytes));
        let plain: Arc<dyn Device> = device.clone();
        Tree::format(&plain, &setup.format).expect("format");
        let panics = Panics::new(&device, name, 0);
        let tree = Tree::open(panics.clone(), setup.open.clone()).expect("open");
        put_round(&tree, 1).expect("apply");
        tree.sync().expect("sync");
        panics.is_armed.store(true, Ordering::Relaxed);
        let since = Instant::now();
        while tree.stats().poisoned.is_none() {
            assert!(since.elapsed() < Duration::from_secs(20), "{name}");
            if !panics.has_panicked() {
                match put_round(&tree, 1) {
                    Ok(()) | Err(Error::Poisoned(_)) => {}
                    Err(error) => panic!("apply: {error}"),
                }
            }
            thread::yield_now();
        }
        assert!(panics.has_panicked());
        assert!(matches!(tree.sync(), Err(Error::Poisoned(_))));
        assert!(matches!(tree.checkpoint(), Err(Error::Poisoned(_))));
        drop(tree);
        holds(device, &setup, 1);
    }
}
