//! Model-checked schedules of the concurrent parts, with `shuttle`: `RUSTFLAGS="--cfg shuttle"
//! cargo test -p ramet-betree --lib shuttled`.
//!
//! One thread runs at a time, and at each lock, condition, device sync and journal write the
//! checker decides which thread goes on: half of the schedules at random, half by PCT (few,
//! well-placed switches). A schedule that fails is printed. `RAMET_SEED` is the first schedule, and
//! `RAMET_SCHEDULES` their number. The checker also finds threads that wait for each other for
//! ever.
//!
//! Locks inside the node table and the devices are the real ones: no thread yields while it holds
//! one.

mod journal;
mod tree;

use std::io;
use std::sync::Arc;

use ramet_block::{Device, MemDevice};
use shuttle::scheduler::{PctScheduler, RandomScheduler};

/// Most switches away from a runnable thread in a schedule of PCT.
const SWITCHES: usize = 4;
const STACK_BYTES: usize = 512 << 10;

fn number(name: &str, default: u64) -> u64 {
    let text = std::env::var(name).ok();
    text.and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Runs `body` under `schedules` schedules, or as many as the environment asks for.
fn explore(schedules: usize, body: impl Fn() + Clone + Send + Sync + 'static) {
    let seed = number("RAMET_SEED", 1);
    let schedules = usize::try_from(number("RAMET_SCHEDULES", schedules as u64)).unwrap();
    println!("RAMET_SEED={seed} RAMET_SCHEDULES={schedules}");
    let mut config = shuttle::Config::new();
    config.stack_size = STACK_BYTES;
    let half = schedules.div_ceil(2);
    let random = RandomScheduler::new_from_seed(seed, half);
    shuttle::Runner::new(random, config.clone()).run(body.clone());
    let pct = PctScheduler::new_from_seed(seed, SWITCHES, half);
    shuttle::Runner::new(pct, config).run(body);
}

/// A device in memory on which a write is durable with the next sync that begins after it.
struct Disk {
    now: MemDevice,
    state: parking_lot::Mutex<Durable>,
    /// Writes below this address, those of the journal, are points at which the checker may switch
    /// threads.
    turns_below: u64,
}

struct Durable {
    bytes: Vec<u8>,
    unsynced: Vec<(usize, Vec<u8>)>,
    /// Writes and syncs that still succeed; only the one after them fails.
    left: Option<u32>,
    /// Syncs that still succeed; the sync after them fails, with all syncs that overlap it or come
    /// later.
    syncs_left: u32,
}

impl Disk {
    fn new(len: usize, turns_below: u64, left: Option<u32>) -> Arc<Self> {
        Arc::new(Self {
            now: MemDevice::new(len as u64),
            state: parking_lot::Mutex::new(Durable {
                bytes: vec![0; len],
                unsynced: Vec::new(),
                left,
                syncs_left: u32::MAX,
            }),
            turns_below,
        })
    }

    fn fail_after(&self, syncs: u32) {
        self.state.lock().syncs_left = syncs;
    }

    /// The worst image that a power cut at this moment leaves.
    fn durable(&self) -> MemDevice {
        let bytes = self.state.lock().bytes.clone();
        let image = MemDevice::new(bytes.len() as u64);
        image.write_at(0, &bytes).unwrap();
        image
    }

    fn spend(state: &mut Durable) -> io::Result<()> {
        match &mut state.left {
            Some(0) => {
                state.left = None;
                // The device has lost these writes: a later sync says nothing about them.
                state.unsynced.clear();
                Err(io::Error::other("a failure of the device"))
            }
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Device for Disk {
    fn len_bytes(&self) -> u64 {
        self.now.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.now.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        if addr < self.turns_below {
            shuttle::thread::yield_now();
        }
        let mut state = self.state.lock();
        Self::spend(&mut state)?;
        let at = usize::try_from(addr).unwrap();
        state.unsynced.push((at, buf.to_vec()));
        self.now.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        let begun = self.state.lock().unsynced.len();
        shuttle::thread::yield_now();
        let mut state = self.state.lock();
        Self::spend(&mut state)?;
        let Some(left) = state.syncs_left.checked_sub(1) else {
            state.unsynced.clear();
            return Err(io::Error::other("a failure of the device"));
        };
        state.syncs_left = left;
        let begun = begun.min(state.unsynced.len());
        let written: Vec<_> = state.unsynced.drain(..begun).collect();
        for (at, bytes) in written {
            state.bytes[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(())
    }

    fn discard(&self, _addr: u64, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }
}
