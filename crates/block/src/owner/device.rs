//! A device that writes only while its volume is its own.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::blocks::{CLAIMS, INTERVAL, PULSES, Standing, read, standing, write_both, write_one};
use super::claim::{ClaimError, Claimant, Contents};
use super::machine::Machine;
use super::record::{Owner, OwnerBlock};
use crate::device::Device;

/// When an owner that writes looks again, before its look is too old.
const RENEW_AFTER: Duration = Duration::from_secs(4);
/// Looks in a row that may be too old already when they are done.
const LOOKS_MAX: usize = 8;
/// Rounds without a change after which unsynced bytes are on the device: the kernel writes them
/// back by itself.
const QUIET_ROUNDS: u32 = 15;

/// The right to write to a volume.
pub(super) struct Lease {
    device: Arc<dyn Device>,
    machine: Arc<dyn Machine>,
    me: Owner,
    /// Until when no look is needed, in nanoseconds of the machine's clock.
    good_until: AtomicU64,
    /// Number of the last pulse. Held over a look.
    pulse: Mutex<u64>,
    /// Why nothing is written any more.
    lost: OnceLock<String>,
    is_closed: AtomicBool,
    /// Writes so far, those before the last sync that succeeded, and calls under way.
    changes: AtomicU64,
    synced: AtomicU64,
    pub(super) busy: AtomicUsize,
    /// Whether the thread that renews waits for a change.
    is_parked: AtomicBool,
    parking: Mutex<()>,
    wake: Condvar,
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Lease {
    /// Fails unless the volume is known to be this opening's: from a look that is young enough, or
    /// from a new one.
    fn check(&self) -> io::Result<()> {
        self.refuse_if_over()?;
        if nanos(self.machine.now()) < self.good_until.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut pulse = self.pulse.lock();
        for _ in 0..LOOKS_MAX {
            // Another thread may have looked meanwhile, and a look may have taken too long.
            if nanos(self.machine.now()) < self.good_until.load(Ordering::Acquire) {
                return self.refuse_if_over();
            }
            self.look(&mut pulse)?;
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    fn refuse_if_over(&self) -> io::Result<()> {
        if let Some(why) = self.lost.get() {
            return Err(io::Error::other(why.clone()));
        }
        if self.is_closed.load(Ordering::Acquire) {
            return Err(io::Error::other("the volume was closed"));
        }
        Ok(())
    }

    fn look(&self, pulse: &mut u64) -> io::Result<()> {
        // Nothing is written to a volume that has another owner already.
        self.require_mine()?;
        *pulse += 1;
        let block = OwnerBlock::Pulse(self.me.clone(), *pulse);
        write_one(&*self.device, PULSES, &block.encode())?;
        // After the pulse: an opener that claims the volume behind this look sees the pulse.
        let since = self.machine.now();
        self.require_mine()?;
        self.good_until
            .store(nanos(since + INTERVAL), Ordering::Release);
        Ok(())
    }

    fn require_mine(&self) -> io::Result<()> {
        let mut error = None;
        let claims = CLAIMS.map(|addr| read(&*self.device, addr).map_err(|e| error = Some(e)).ok());
        let why = match (standing(&claims, &self.me), error) {
            (Standing::Mine, _) => return Ok(()),
            (Standing::Others(owner), _) => {
                format!("{owner} has opened the volume, which is its own now")
            }
            // The other claim may name another owner.
            (Standing::Nobodys, Some(error)) => return Err(error),
            (Standing::Nobodys, None) => {
                "the claim of this process is gone from the volume".to_owned()
            }
        };
        let why = self.lost.get_or_init(|| why);
        Err(io::Error::other(why.clone()))
    }

    /// Does a call that changes the device, if that is allowed.
    fn change<T>(&self, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let _busy = Busy::new(self);
        self.check()?;
        self.changes.fetch_add(1, Ordering::SeqCst);
        if self.is_parked.load(Ordering::SeqCst) {
            drop(self.parking.lock());
            self.wake.notify_all();
        }
        work()
    }

    /// Makes the volume nobody's. Everything is synced.
    fn free(&self) -> io::Result<()> {
        let freed = match self.lost.get() {
            Some(_) => Ok(()),
            // Not over the claim of another one.
            None => self
                .check()
                .and_then(|()| write_both(&*self.device, CLAIMS, &OwnerBlock::Free.encode())),
        };
        self.is_closed.store(true, Ordering::Release);
        self.machine.close(&self.me);
        freed
    }

    /// Looks again if there is anything to protect; `false` when there has not been for long.
    pub(super) fn renew(&self, round: &mut Round) -> bool {
        let changes = self.changes.load(Ordering::SeqCst);
        let is_busy = self.busy.load(Ordering::SeqCst) > 0;
        round.quiet = if changes == round.changes && !is_busy {
            round.quiet + 1
        } else {
            0
        };
        round.changes = changes;
        let is_synced = changes == self.synced.load(Ordering::SeqCst);
        if round.quiet >= QUIET_ROUNDS || round.quiet > 0 && is_synced {
            return false;
        }
        if self.refuse_if_over().is_ok() {
            // The next write looks again, and reports a failure.
            let _ = self.look(&mut self.pulse.lock());
        }
        true
    }

    /// Keeps the look young while there are changes.
    fn keep(&self) {
        let mut round = Round::default();
        loop {
            let mut parking = self.parking.lock();
            if self.is_closed.load(Ordering::SeqCst) {
                return;
            }
            self.wake.wait_for(&mut parking, RENEW_AFTER);
            drop(parking);
            if self.renew(&mut round) {
                continue;
            }
            let mut parking = self.parking.lock();
            self.is_parked.store(true, Ordering::SeqCst);
            while self.changes.load(Ordering::SeqCst) == round.changes
                && !self.is_closed.load(Ordering::SeqCst)
            {
                self.wake.wait(&mut parking);
            }
            self.is_parked.store(false, Ordering::SeqCst);
        }
    }
}

/// State of the volume at the last round of the thread that renews.
#[derive(Default)]
pub(super) struct Round {
    changes: u64,
    /// Rounds since the last change.
    quiet: u32,
}

/// Counts a call under way.
struct Busy<'a>(&'a Lease);

impl<'a> Busy<'a> {
    fn new(lease: &'a Lease) -> Self {
        lease.busy.fetch_add(1, Ordering::SeqCst);
        Self(lease)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A device whose volume belongs to one opening: it writes, and reports syncs, as long as no other
/// opening has taken the volume.
///
/// Every call that changes the device, and every sync after it succeeded, looks at the claim when
/// the last look is older than [`INTERVAL`]. The first one that finds another owner fails, and all
/// after it. Reads are not looked after. When it is released, or dropped, the volume is nobody's.
pub struct OwnedDevice {
    pub(super) lease: Arc<Lease>,
    renewer: Mutex<Option<JoinHandle<()>>>,
}

impl OwnedDevice {
    /// Takes the volume on `device`. When its owner may be alive, `note` is told so and this waits
    /// two intervals.
    ///
    /// # Errors
    /// [`ClaimError`]; `InUse` when it has another owner.
    pub fn claim(
        device: Arc<dyn Device>,
        machine: Arc<dyn Machine>,
        contents: Contents,
        note: &mut dyn FnMut(&str),
    ) -> Result<Self, ClaimError> {
        let me = machine.open();
        let claimant = Claimant {
            device: &*device,
            machine: &*machine,
            me: &me,
            contents,
        };
        let since = claimant.take(note).inspect_err(|_| machine.close(&me))?;
        let lease = Arc::new(Lease {
            device,
            machine,
            me,
            good_until: AtomicU64::new(nanos(since + INTERVAL)),
            pulse: Mutex::new(0),
            lost: OnceLock::new(),
            is_closed: AtomicBool::new(false),
            changes: AtomicU64::new(0),
            synced: AtomicU64::new(0),
            busy: AtomicUsize::new(0),
            is_parked: AtomicBool::new(false),
            parking: Mutex::new(()),
            wake: Condvar::new(),
        });
        // Not kept alive by the device below.
        let weak = Arc::downgrade(&lease);
        lease.device.check_late_writes(Arc::new(move || {
            weak.upgrade().map_or(Ok(()), |lease| lease.check())
        }));
        Ok(Self {
            lease,
            renewer: Mutex::default(),
        })
    }

    /// Starts a thread that looks again before a look is too old, as long as there are changes.
    /// Without it, the call that finds it too old looks, and another opener may take the volume
    /// while a call of this one takes long.
    ///
    /// # Errors
    /// There are no more threads.
    pub fn keep_renewed(&self) -> io::Result<()> {
        let lease = self.lease.clone();
        let thread = std::thread::Builder::new().name("ramet-owner".into());
        let spawned = thread.stack_size(128 << 10).spawn(move || {
            ramet_sys::run_anywhere();
            lease.keep();
        })?;
        *self.renewer.lock() = Some(spawned);
        Ok(())
    }

    /// Ends the ownership. Writes of this owner must not arrive behind those of another one, so they
    /// are synced first; after a failure of that the claim stays.
    fn end_synced(&self) -> io::Result<()> {
        let lease = &self.lease;
        let is_synced = lease.changes.load(Ordering::SeqCst) == lease.synced.load(Ordering::SeqCst);
        let is_closed = lease.is_closed.load(Ordering::Acquire);
        let synced = match is_synced || is_closed {
            true => Ok(()),
            false => self.sync(),
        };
        if synced.is_err() {
            lease.lost.get_or_init(|| "not synced".into());
        }
        let ended = self.end();
        synced.and(ended)
    }

    fn end(&self) -> io::Result<()> {
        if self.lease.is_closed.load(Ordering::Acquire) {
            return Ok(());
        }
        let freed = self.lease.free();
        drop(self.lease.parking.lock());
        self.lease.wake.notify_all();
        if let Some(renewer) = self.renewer.lock().take() {
            // It panics nowhere, and nobody waits for it.
            let _ = renewer.join();
        }
        freed
    }
}

impl Drop for OwnedDevice {
    fn drop(&mut self) {
        let _ = self.end_synced();
    }
}

impl Device for OwnedDevice {
    fn len_bytes(&self) -> u64 {
        self.lease.device.len_bytes()
    }

    fn grow(&self, len_bytes: u64) -> io::Result<()> {
        let lease = &self.lease;
        lease.change(|| lease.device.grow(len_bytes))?;
        lease.check()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.lease.device.read_at(addr, buf)
    }

    fn read_alone_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.lease.device.read_alone_at(addr, buf)
    }

    fn read_fresh(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.lease.device.read_fresh(addr, buf)
    }

    fn expect_read(&self, addr: u64, len_bytes: u64) {
        self.lease.device.expect_read(addr, len_bytes);
    }

    fn forget_read(&self, addr: u64, len_bytes: u64) {
        self.lease.device.forget_read(addr, len_bytes);
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        let lease = &self.lease;
        lease.change(|| lease.device.write_at(addr, buf))
    }

    fn write_bulk(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        let lease = &self.lease;
        lease.change(|| lease.device.write_bulk(addr, buf))
    }

    fn write_through(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        let lease = &self.lease;
        lease.change(|| lease.device.write_through(addr, buf))
    }

    fn sync(&self) -> io::Result<()> {
        let lease = &self.lease;
        let _busy = Busy::new(lease);
        lease.check()?;
        let changes = lease.changes.load(Ordering::SeqCst);
        lease.device.sync()?;
        // An acknowledgement of this may be the next thing.
        lease.check()?;
        lease.synced.fetch_max(changes, Ordering::SeqCst);
        Ok(())
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        let lease = &self.lease;
        lease.change(|| lease.device.discard(addr, len_bytes))
    }

    fn is_sparse(&self) -> bool {
        self.lease.device.is_sparse()
    }

    fn host_free_bytes(&self) -> io::Result<u64> {
        self.lease.device.host_free_bytes()
    }

    fn host_allocated_bytes(&self) -> io::Result<u64> {
        self.lease.device.host_allocated_bytes()
    }

    fn allocate(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        let lease = &self.lease;
        lease.change(|| lease.device.allocate(addr, len_bytes))
    }

    fn release(&self) -> io::Result<()> {
        self.end_synced()
    }
}
