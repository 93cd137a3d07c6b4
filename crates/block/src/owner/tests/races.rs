//! Openings at the same time, one step at a time in any order, on a clock that jumps.
//!
//! Each opening is a thread that waits for its turn before each access to an owner block and before
//! each call; one at a time runs, and a seed chooses which, and how much time passes. A write to
//! the data follows the check without a step between: a write that is under way when a machine
//! stops cannot be held back. Each opening reads a number, writes the next one, syncs, and notes
//! that number as acknowledged. So a number that was acknowledged must never come back.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use parking_lot::Condvar;

use super::*;

/// As in the tests of the journal: small, and the same everywhere.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % n
    }
}

#[derive(Default)]
struct Turns {
    state: Mutex<TurnState>,
    changed: Condvar,
}

#[derive(Default)]
struct TurnState {
    turn: Option<usize>,
    waiting: Vec<bool>,
    ended: Vec<bool>,
}

impl Turns {
    fn wait(&self, who: usize) {
        let mut state = self.state.lock();
        if state.turn == Some(who) {
            state.turn = None;
        }
        state.waiting[who] = true;
        self.changed.notify_all();
        while state.turn != Some(who) {
            self.changed.wait(&mut state);
        }
        state.waiting[who] = false;
    }

    fn end(&self, who: usize) {
        let mut state = self.state.lock();
        state.turn = None;
        state.ended[who] = true;
        self.changed.notify_all();
    }

    /// Gives turns until all have ended.
    fn run(&self, rng: &mut Rng, clock: &Mutex<Duration>) {
        loop {
            let mut state = self.state.lock();
            let settled = |state: &TurnState| {
                let each = state.waiting.iter().zip(&state.ended);
                state.turn.is_none() && each.into_iter().all(|(waits, ended)| *waits || *ended)
            };
            while !settled(&state) {
                self.changed.wait(&mut state);
            }
            let waiting: Vec<usize> = (0..state.ended.len())
                .filter(|at| !state.ended[*at])
                .collect();
            if waiting.is_empty() {
                return;
            }
            // Mostly the same one goes on, and mostly no time passes.
            if rng.below(4) == 0 {
                *clock.lock() += Duration::from_millis(rng.below(7000));
            }
            let next = rng.below(waiting.len() as u64) as usize;
            state.turn = Some(waiting[next]);
            self.changed.notify_all();
        }
    }
}

/// The disk as one opening sees it.
struct Stepped {
    disk: Arc<Disk>,
    turns: Arc<Turns>,
    who: usize,
}

impl Stepped {
    fn step(&self, addr: u64) {
        if addr < AREA_END {
            self.turns.wait(self.who);
        }
    }
}

impl Device for Stepped {
    fn len_bytes(&self) -> u64 {
        self.disk.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.step(addr);
        self.disk.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.step(addr);
        self.disk.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }
}

/// A machine that waits for its turn while it sleeps.
struct Sleeper {
    host: Arc<Host>,
    turns: Arc<Turns>,
    who: usize,
}

impl Machine for Sleeper {
    fn now(&self) -> Duration {
        self.host.now()
    }

    fn sleep(&self, time: Duration) {
        let end = self.now() + time;
        while self.now() < end {
            self.turns.wait(self.who);
        }
    }

    fn open(&self) -> Owner {
        self.host.open()
    }

    fn close(&self, owner: &Owner) {
        self.host.close(owner);
    }

    fn life(&self, owner: &Owner) -> Life {
        self.host.life(owner)
    }
}

const NAMES: [&str; 3] = ["one", "two", "three"];

#[derive(Default)]
struct Counts {
    opened: AtomicUsize,
    refused: AtomicUsize,
    stopped: AtomicUsize,
    acknowledged: AtomicU64,
}

/// The life of one machine: it opens, counts, and closes or dies, a few times.
fn live(
    who: usize,
    seed: u64,
    disk: &Arc<Disk>,
    clock: &Arc<Mutex<Duration>>,
    turns: &Arc<Turns>,
    counts: &Counts,
) {
    let mut rng = Rng(seed ^ (who as u64) << 32);
    let stepped: Arc<dyn Device> = Arc::new(Stepped {
        disk: disk.clone(),
        turns: turns.clone(),
        who,
    });
    let machine: Arc<dyn Machine> = Arc::new(Sleeper {
        host: Host::new(NAMES[who], clock),
        turns: turns.clone(),
        who,
    });
    for _ in 0..3 {
        turns.wait(who);
        let claimed = OwnedDevice::claim(
            stepped.clone(),
            machine.clone(),
            Contents::Volume,
            &mut |_| {},
        );
        let Ok(device) = claimed else {
            counts.refused.fetch_add(1, Ordering::Relaxed);
            continue;
        };
        counts.opened.fetch_add(1, Ordering::Relaxed);
        let mut bytes = [0; 8];
        device.read_at(DATA, &mut bytes).unwrap();
        let mut number = u64::from_le_bytes(bytes);
        for _ in 0..rng.below(12) {
            turns.wait(who);
            let known = counts.acknowledged.load(Ordering::Relaxed);
            number += 1;
            let done = device
                .write_at(DATA, &number.to_le_bytes())
                .and_then(|()| device.sync());
            if done.is_err() {
                counts.stopped.fetch_add(1, Ordering::Relaxed);
                break;
            }
            assert!(
                number > known,
                "{} acknowledges {number} behind {known}",
                NAMES[who]
            );
            counts.acknowledged.fetch_max(number, Ordering::Relaxed);
        }
        if rng.below(3) == 0 {
            die(device);
        }
    }
}

#[test]
fn of_openings_at_the_same_time_one_writes() {
    let counts = Counts::default();
    let seeds = std::env::var("RAMET_SEEDS").map_or(400, |text| text.parse().unwrap());
    for seed in 0..seeds {
        let clock = Arc::new(Mutex::new(Duration::from_secs(1000)));
        let (disk, turns) = (Disk::new(), Arc::new(Turns::default()));
        {
            let mut state = turns.state.lock();
            state.waiting = vec![false; NAMES.len()];
            state.ended = vec![false; NAMES.len()];
        }
        counts.acknowledged.store(0, Ordering::Relaxed);
        thread::scope(|scope| {
            for who in 0..NAMES.len() {
                let (disk, clock, turns, counts) = (&disk, &clock, &turns, &counts);
                scope.spawn(move || {
                    /// Also when it panics, so that the others go on.
                    struct End<'a>(&'a Turns, usize);
                    impl Drop for End<'_> {
                        fn drop(&mut self) {
                            self.0.end(self.1);
                        }
                    }
                    let _end = End(turns, who);
                    live(who, seed, disk, clock, turns, counts);
                });
            }
            turns.run(&mut Rng(seed), &clock);
        });
    }
    let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
    let seen = [&counts.opened, &counts.refused, &counts.stopped].map(count);
    println!("opened, refused, stopped: {seen:?}");
    assert!(seen.iter().all(|count| *count > 10), "{seen:?}");
}
