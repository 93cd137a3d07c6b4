//! Openings of one device in memory, on a clock that the tests drive.

mod races;

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;

use super::blocks::*;
use super::claim::PATIENCE;
use super::device::Round;
use super::*;
use crate::superblock::{AREA_END, SuperblockError, read_superblock, write_superblock};
use crate::{
    Codec, Extent, FORMAT_VERSION, JournalPos, Label, MemDevice, MetadataCopies, PageRef,
    Superblock,
};

type Hook = Box<dyn FnMut(Duration) + Send>;

/// A machine whose clock moves when it sleeps, and as the test says.
#[derive(Default)]
pub(super) struct Host {
    name: &'static str,
    state: Mutex<HostState>,
    clock: Arc<Mutex<Duration>>,
    /// Runs whenever this machine sleeps.
    on_sleep: Mutex<Option<Hook>>,
}

#[derive(Default)]
struct HostState {
    opened: u8,
    dead: BTreeSet<[u8; 16]>,
}

impl Host {
    fn new(name: &'static str, clock: &Arc<Mutex<Duration>>) -> Arc<Self> {
        Arc::new(Self {
            name,
            clock: clock.clone(),
            ..Self::default()
        })
    }
}

impl Machine for Host {
    fn now(&self) -> Duration {
        *self.clock.lock()
    }

    fn sleep(&self, time: Duration) {
        *self.clock.lock() += time;
        let hook = self.on_sleep.lock().take();
        if let Some(mut hook) = hook {
            hook(self.now());
            *self.on_sleep.lock() = Some(hook);
        }
    }

    fn open(&self) -> Owner {
        let mut state = self.state.lock();
        state.opened += 1;
        let mut id = [state.opened; 16];
        id[..self.name.len()].copy_from_slice(self.name.as_bytes());
        Owner {
            id,
            process: Process {
                pid: 7,
                ..Process::default()
            },
            host: self.name.into(),
        }
    }

    fn close(&self, owner: &Owner) {
        self.state.lock().dead.insert(owner.id);
    }

    fn life(&self, owner: &Owner) -> Life {
        match self.state.lock().dead.contains(&owner.id) {
            true => Life::Dead,
            false => Life::Unknown,
        }
    }
}

/// Addresses at which calls fail.
#[derive(Default)]
struct Faults {
    unreadable: BTreeSet<u64>,
    unwritable: BTreeSet<u64>,
}

/// A device in memory with bad blocks, which counts its calls.
struct Disk {
    bytes: MemDevice,
    faults: Mutex<Faults>,
    writes: Mutex<Vec<u64>>,
    syncs: Mutex<u64>,
    /// The writes before the last sync.
    synced: Mutex<usize>,
}

impl Disk {
    /// A disk with a volume that was never opened.
    fn new() -> Arc<Self> {
        let disk = Self {
            bytes: MemDevice::new(16 << 20),
            faults: Mutex::default(),
            writes: Mutex::default(),
            syncs: Mutex::default(),
            synced: Mutex::default(),
        };
        for generation in [1, 2] {
            write_superblock(&disk.bytes, &superblock(generation)).unwrap();
        }
        Arc::new(disk)
    }

    fn with_faults(change: impl FnOnce(&mut Faults)) -> Arc<Self> {
        let disk = Self::new();
        change(&mut disk.faults.lock());
        disk
    }

    fn writes_at(&self, places: [u64; 2]) -> usize {
        let writes = self.writes.lock();
        writes.iter().filter(|addr| places.contains(addr)).count()
    }

    fn byte(&self, addr: u64) -> u8 {
        let mut byte = [0];
        self.bytes.read_at(addr, &mut byte).unwrap();
        byte[0]
    }
}

impl Device for Disk {
    fn len_bytes(&self) -> u64 {
        self.bytes.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        if self.faults.lock().unreadable.contains(&addr) {
            return Err(io::Error::other("a bad sector"));
        }
        self.bytes.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        if self.faults.lock().unwritable.contains(&addr) {
            return Err(io::Error::other("a bad sector"));
        }
        self.writes.lock().push(addr);
        self.bytes.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        *self.syncs.lock() += 1;
        *self.synced.lock() = self.writes.lock().len();
        Ok(())
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.bytes.discard(addr, len_bytes)
    }
}

/// A disk as one machine sees it, whose cache keeps all that it has read.
struct Cached {
    disk: Arc<Disk>,
    cache: Mutex<Option<Vec<u8>>>,
}

impl Device for Cached {
    fn len_bytes(&self) -> u64 {
        self.disk.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut cache = self.cache.lock();
        let cached = cache.get_or_insert_with(|| {
            let mut all = vec![0; usize::try_from(self.disk.len_bytes()).unwrap()];
            self.disk.read_at(0, &mut all).unwrap();
            all
        });
        let at = usize::try_from(addr).unwrap();
        buf.copy_from_slice(&cached[at..at + buf.len()]);
        Ok(())
    }

    fn read_fresh(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.disk.read_at(addr, buf)
    }

    fn forget_read(&self, _addr: u64, _len_bytes: u64) {
        *self.cache.lock() = None;
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        if let Some(cached) = &mut *self.cache.lock() {
            let at = usize::try_from(addr).unwrap();
            cached[at..at + buf.len()].copy_from_slice(buf);
        }
        self.disk.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        self.disk.sync()
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.disk.discard(addr, len_bytes)
    }
}

fn superblock(generation: u64) -> Superblock {
    Superblock {
        uuid: [7; 16],
        format_version: FORMAT_VERSION,
        generation,
        epoch: 1,
        volume_bytes: 16 << 20,
        journal: Extent::new(AREA_END, 1 << 20),
        journal_start: JournalPos::default(),
        node_table: PageRef::NONE,
        space_map: PageRef::NONE,
        root_node: 0,
        next_node: 1,
        next_seq: 1,
        leaf_bytes: 1 << 20,
        basement_bytes: 32 << 10,
        fanout: 64,
        codec: Codec::Raw,
        clean: true,
        space_debt: false,
        is_unfinished: false,
        metadata_copies: MetadataCopies::Two,
        label: Label::default(),
        node_seed: 0,
        openings: 1,
    }
}

const DATA: u64 = 4 << 20;

struct Taken {
    device: Result<OwnedDevice, ClaimError>,
    waited: Duration,
    notes: Vec<String>,
}

fn open(disk: &Arc<impl Device + 'static>, host: &Arc<Host>) -> Taken {
    let begun = host.now();
    let mut notes = Vec::new();
    let device = OwnedDevice::claim(disk.clone(), host.clone(), Contents::Volume, &mut |note| {
        notes.push(note.to_owned())
    });
    Taken {
        device,
        waited: host.now() - begun,
        notes,
    }
}

fn at_once(taken: Taken) -> OwnedDevice {
    assert_eq!(taken.waited, Duration::ZERO);
    assert!(taken.notes.is_empty(), "{:?}", taken.notes);
    taken.device.unwrap()
}

fn after_a_wait(taken: Taken) -> OwnedDevice {
    assert!(taken.waited >= PATIENCE, "{:?}", taken.waited);
    assert_eq!(taken.notes.len(), 1);
    taken.device.unwrap()
}

fn refused(taken: Taken) -> String {
    match taken.device {
        Err(ClaimError::InUse(by)) => by,
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("it was let in"),
    }
}

/// As when the process ends in the middle of everything.
fn die(device: OwnedDevice) {
    std::mem::forget(device);
}

fn hosts() -> (Arc<Mutex<Duration>>, Arc<Host>, Arc<Host>) {
    let clock = Arc::new(Mutex::new(Duration::from_secs(1000)));
    let (one, other) = (Host::new("one", &clock), Host::new("other", &clock));
    (clock, one, other)
}

#[test]
fn a_volume_that_was_closed_is_taken_at_once() {
    let (_, one, other) = hosts();
    let disk = Disk::new();
    for host in [&one, &other, &one] {
        let device = at_once(open(&disk, host));
        device.write_at(DATA, &[1]).unwrap();
        device.sync().unwrap();
        device.release().unwrap();
        assert!(device.write_at(DATA, &[2]).is_err());
        assert!(device.sync().is_err());
    }
    // Dropped is as good as released.
    drop(at_once(open(&disk, &one)));
    let device = at_once(open(&disk, &other));
    device.write_at(DATA, &[3]).unwrap();
    assert_eq!(inspect(&*disk).0.unwrap().host, "other");
    drop(device);
    assert_eq!(inspect(&*disk), (None, Vec::new()));
}

#[test]
fn a_volume_that_another_machine_closed_meanwhile_is_not_read_from_an_old_cache() {
    let (_, one, other) = hosts();
    let disk = Disk::new();
    let seen_by_other = Arc::new(Cached {
        disk: Arc::clone(&disk),
        cache: Mutex::default(),
    });
    drop(at_once(open(&seen_by_other, &other)));
    let generation = || read_superblock(&*seen_by_other).unwrap().generation;
    assert_eq!(generation(), 2);
    let first = at_once(open(&disk, &one));
    first.write_at(DATA, &[9]).unwrap();
    write_superblock(&first, &superblock(3)).unwrap();
    drop(first);
    let second = at_once(open(&seen_by_other, &other));
    assert_eq!(generation(), 3);
    let mut byte = [0];
    second.read_at(DATA, &mut byte).unwrap();
    assert_eq!(byte, [9]);
}

#[test]
fn all_writes_are_synced_before_a_volume_is_nobodys() {
    let (_, one, _) = hosts();
    let disk = Disk::new();
    let device = at_once(open(&disk, &one));
    device.write_at(DATA, &[1]).unwrap();
    device.sync().unwrap();
    device.write_at(DATA + 4096, &[1]).unwrap();
    device.release().unwrap();
    let late = disk.writes.lock().split_off(*disk.synced.lock());
    assert_eq!(late, CLAIMS);
    let syncs = *disk.syncs.lock();
    let device = at_once(open(&disk, &one));
    device.write_at(DATA, &[2]).unwrap();
    device.sync().unwrap();
    device.release().unwrap();
    assert_eq!(
        *disk.syncs.lock(),
        syncs + 1,
        "one that is synced is not synced again"
    );
}

#[test]
fn an_owner_that_gives_room_back_shows_that_it_lives() {
    let (_, one, _) = hosts();
    let disk = Disk::new();
    let device = at_once(open(&disk, &one));
    let mut round = Round::default();
    while device.lease.renew(&mut round) {}
    device.discard(DATA, 4096).unwrap();
    assert!(device.lease.renew(&mut round));
    while device.lease.renew(&mut round) {}
    device.allocate(DATA, 4096).unwrap();
    assert!(device.lease.renew(&mut round));
}

#[test]
fn an_owner_that_is_known_to_have_ended_is_not_waited_for() {
    let (_, one, _) = hosts();
    let disk = Disk::new();
    let first = at_once(open(&disk, &one));
    let owner = inspect(&*disk).0.unwrap();
    die(first);
    one.close(&owner);
    at_once(open(&disk, &one));
}

#[test]
fn a_silent_owner_is_waited_for_and_writes_nothing_when_it_comes_back() {
    let (clock, one, other) = hosts();
    let disk = Disk::new();
    let first = at_once(open(&disk, &one));
    first.write_at(DATA, &[1]).unwrap();
    first.sync().unwrap();
    let taken = open(&disk, &other);
    assert!(
        taken.notes[0].contains("process 7 of one"),
        "{:?}",
        taken.notes
    );
    let second = after_a_wait(taken);
    second.write_at(DATA, &[2]).unwrap();
    second.sync().unwrap();

    let writes = disk.writes.lock().len();
    let syncs = *disk.syncs.lock();
    for _ in 0..2 {
        let error = first.write_at(DATA, &[3]).unwrap_err().to_string();
        assert!(error.contains("process 7 of other"), "{error}");
        assert!(first.write_bulk(DATA, &[3]).is_err());
        assert!(first.sync().is_err());
        assert!(first.discard(DATA, 4096).is_err());
        assert!(first.grow(32 << 20).is_err());
    }
    assert_eq!(disk.writes.lock().len(), writes, "not even a pulse");
    assert_eq!(*disk.syncs.lock(), syncs);
    drop(first);
    assert_eq!(inspect(&*disk).0.unwrap().host, "other");
    *clock.lock() += Duration::from_secs(60);
    second.write_at(DATA, &[4]).unwrap();
    second.sync().unwrap();
    assert_eq!(disk.byte(DATA), 4);
}

#[test]
fn closing_a_volume_that_another_owner_has_taken_leaves_it_to_that_one() {
    let (_, one, other) = hosts();
    let disk = Disk::new();
    let first = at_once(open(&disk, &one));
    let second = after_a_wait(open(&disk, &other));
    assert!(first.release().is_err());
    drop(first);
    assert_eq!(inspect(&*disk).0.unwrap().host, "other");
    second.write_at(DATA, &[1]).unwrap();
}

#[test]
fn a_sync_that_takes_longer_than_a_look_is_good_for_is_reported_only_to_the_owner() {
    struct Slow {
        disk: Arc<Disk>,
        during_sync: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    }
    impl Device for Slow {
        fn len_bytes(&self) -> u64 {
            self.disk.len_bytes()
        }
        fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
            self.disk.read_at(addr, buf)
        }
        fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
            self.disk.write_at(addr, buf)
        }
        fn sync(&self) -> io::Result<()> {
            if let Some(happens) = self.during_sync.lock().take() {
                happens();
            }
            Ok(())
        }
        fn discard(&self, _: u64, _: u64) -> io::Result<()> {
            Ok(())
        }
    }
    let (clock, one, other) = hosts();
    let slow = Arc::new(Slow {
        disk: Disk::new(),
        during_sync: Mutex::default(),
    });
    let contents = Contents::Volume;
    let first = OwnedDevice::claim(slow.clone(), one, contents, &mut |_| {}).unwrap();
    let pulses = slow.disk.writes_at(PULSES);
    let later = clock.clone();
    *slow.during_sync.lock() = Some(Box::new(move || *later.lock() += INTERVAL * 3));
    first.write_at(DATA, &[1]).unwrap();
    first.sync().unwrap();
    assert_eq!(slow.disk.writes_at(PULSES), pulses + 1);

    let disk = slow.disk.clone();
    *slow.during_sync.lock() = Some(Box::new(move || die(after_a_wait(open(&disk, &other)))));
    first.write_at(DATA, &[2]).unwrap();
    assert!(first.sync().is_err());
}

#[test]
fn an_owner_that_writes_refuses_others() {
    let (_, one, other) = hosts();
    let disk = Disk::new();
    let first = Arc::new(at_once(open(&disk, &one)));
    let writer = first.clone();
    *other.on_sleep.lock() = Some(Box::new(move |_| writer.write_at(DATA, &[1]).unwrap()));
    let taken = open(&disk, &other);
    assert!(taken.waited <= PATIENCE);
    assert_eq!(refused(taken), "process 7 of one");
    first.write_at(DATA, &[2]).unwrap();
    first.sync().unwrap();
}

#[test]
fn an_owner_that_closes_is_waited_for_no_longer() {
    let (_, one, other) = hosts();
    let disk = Disk::new();
    let mut first = Some(at_once(open(&disk, &one)));
    *other.on_sleep.lock() = Some(Box::new(move |_| drop(first.take())));
    let taken = open(&disk, &other);
    assert!(taken.waited < Duration::from_secs(1));
    taken.device.unwrap();
}

#[test]
fn an_owner_that_wakes_up_while_the_volume_is_taken_is_let_look_first() {
    /// Lets the old owner write between two steps of the new one.
    struct Between {
        disk: Arc<Disk>,
        calls: Mutex<(usize, usize)>,
        first: Arc<OwnedDevice>,
    }
    impl Between {
        fn step(&self) {
            let mut calls = self.calls.lock();
            calls.0 += 1;
            if calls.0 == calls.1 {
                let _ = self.first.write_at(DATA, &[1]);
            }
        }
    }
    impl Device for Between {
        fn len_bytes(&self) -> u64 {
            self.disk.len_bytes()
        }
        fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
            self.step();
            self.disk.read_at(addr, buf)
        }
        fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
            self.step();
            self.disk.write_at(addr, buf)
        }
        fn sync(&self) -> io::Result<()> {
            Ok(())
        }
        fn discard(&self, _: u64, _: u64) -> io::Result<()> {
            Ok(())
        }
    }
    let mut outcomes = [0; 3];
    for at in 1..400 {
        let (_, one, other) = hosts();
        let disk = Disk::new();
        let first = Arc::new(at_once(open(&disk, &one)));
        let between = Arc::new(Between {
            disk: disk.clone(),
            calls: Mutex::new((0, at)),
            first: first.clone(),
        });
        let begun = other.now();
        let machine = other.clone();
        let taken = OwnedDevice::claim(between.clone(), machine, Contents::Volume, &mut |_| {});
        let calls = between.calls.lock().0;
        let waited = other.now() - begun;
        match taken {
            Err(ClaimError::InUse(_)) => {
                first.write_at(DATA, &[2]).unwrap();
                outcomes[0] += 1;
            }
            Err(error) => panic!("{at}: {error}"),
            Ok(_) if waited > PATIENCE + Duration::from_secs(1) => {
                assert!(first.write_at(DATA, &[2]).is_err(), "{at}");
                outcomes[1] += 1;
            }
            Ok(_) => {
                assert!(first.write_at(DATA, &[2]).is_err(), "{at}");
                outcomes[2] += 1;
            }
        }
        if calls < at {
            break;
        }
    }
    assert!(outcomes.iter().all(|count| *count > 0), "{outcomes:?}");
}

#[test]
fn damaged_owner_blocks_are_waited_out_and_mended() {
    let (_, one, _) = hosts();
    for places in [CLAIMS, INTENTS, PULSES] {
        for spoilt in [vec![places[0]], vec![places[1]], places.to_vec()] {
            let disk = Disk::new();
            for addr in &spoilt {
                disk.bytes.write_at(*addr, &[0xaa; 4096]).unwrap();
            }
            assert_eq!(inspect(&*disk).1.len(), spoilt.len());
            let taken = open(&disk, &one);
            drop(match places == CLAIMS {
                true => after_a_wait(taken),
                false => at_once(taken),
            });
            assert_eq!(inspect(&*disk), (None, Vec::new()), "{spoilt:?}");
            at_once(open(&disk, &one));
        }
    }
}

#[test]
fn one_bad_block_of_each_kind_is_in_nobodys_way() {
    let (clock, one, other) = hosts();
    for which in 0..2 {
        let bad = [CLAIMS[which], INTENTS[which], PULSES[which]];
        let disk = Disk::with_faults(|faults| {
            faults.unreadable.extend(bad);
            faults.unwritable.extend(bad);
        });
        let first = open(&disk, &one).device.unwrap();
        first.write_at(DATA, &[1]).unwrap();
        *clock.lock() += INTERVAL;
        first.write_at(DATA, &[2]).unwrap();
        first.sync().unwrap();
        let second = open(&disk, &other).device.unwrap();
        assert!(first.write_at(DATA, &[3]).is_err());
        second.write_at(DATA, &[4]).unwrap();
        assert_eq!(disk.byte(DATA), 4);
    }
}

#[test]
fn an_owner_that_cannot_look_or_be_seen_does_not_write() {
    let (clock, one, _) = hosts();
    let faults: [fn(&mut Faults); 2] = [
        |faults| faults.unreadable.extend(CLAIMS),
        |faults| faults.unwritable.extend(PULSES),
    ];
    for fault in faults {
        let disk = Disk::new();
        let first = at_once(open(&disk, &one));
        fault(&mut disk.faults.lock());
        first.write_at(DATA, &[1]).unwrap();
        *clock.lock() += INTERVAL;
        for _ in 0..2 {
            assert!(first.write_at(DATA, &[2]).is_err());
            assert!(first.sync().is_err());
        }
        // A failure that passes does not end the ownership.
        *disk.faults.lock() = Faults::default();
        first.write_at(DATA, &[3]).unwrap();
        first.sync().unwrap();
    }
}

#[test]
fn a_claim_that_cannot_be_written_is_none() {
    let (_, one, _) = hosts();
    let disk = Disk::with_faults(|faults| faults.unwritable.extend(CLAIMS));
    let taken = open(&disk, &one);
    assert!(matches!(taken.device, Err(ClaimError::Io(_))));
    // The same holds for a claim that does not read back.
    let disk = Disk::with_faults(|faults| faults.unreadable.extend(CLAIMS));
    assert!(matches!(open(&disk, &one).device, Err(ClaimError::Io(_))));
    // Others cannot see that this one wants the volume: it gives them time.
    let disk = Disk::with_faults(|faults| faults.unwritable.extend(INTENTS));
    let taken = open(&disk, &one);
    assert!(taken.waited >= PATIENCE);
    taken.device.unwrap();
}

#[test]
fn nothing_is_written_where_there_is_no_volume() {
    let (_, one, _) = hosts();
    let disk = Disk::new();
    let area = vec![0; AREA_END as usize];
    disk.bytes.write_at(0, &area).unwrap();
    let taken = open(&disk, &one);
    assert!(matches!(
        taken.device,
        Err(ClaimError::Superblock(SuperblockError::NotAVolume))
    ));
    assert!(disk.writes.lock().is_empty());
    // Before mkfs, the bytes in the place of the superblock say nothing.
    disk.bytes
        .write_at(0, &vec![0xaa; AREA_END as usize])
        .unwrap();
    let made = OwnedDevice::claim(disk.clone(), one, Contents::Anything, &mut |_| {
        panic!("it waits for nobody");
    });
    drop(made.unwrap());
    assert_eq!(inspect(&*disk), (None, Vec::new()));
}

#[test]
fn a_claim_that_is_gone_ends_the_writing() {
    let (clock, one, _) = hosts();
    let disk = Disk::new();
    let first = at_once(open(&disk, &one));
    for addr in CLAIMS {
        disk.bytes.write_at(addr, &[0; 4096]).unwrap();
    }
    first.write_at(DATA, &[1]).unwrap();
    *clock.lock() += INTERVAL;
    let error = first.write_at(DATA, &[2]).unwrap_err().to_string();
    assert!(error.contains("is gone"), "{error}");
}

#[test]
fn an_owner_costs_one_write_each_interval_while_it_writes_and_none_when_idle() {
    let (clock, one, _) = hosts();
    let disk = Disk::new();
    let first = at_once(open(&disk, &one));
    let (mut round, claimed) = (Round::default(), disk.writes.lock().len());
    let pulses = disk.writes_at(PULSES);
    // Synchronous writes, a thousand a second, and a round of the thread every four.
    for _ in 0..10 {
        for _ in 0..4000 {
            first.write_at(DATA, &[1]).unwrap();
            first.sync().unwrap();
            *clock.lock() += Duration::from_millis(1);
        }
        assert!(first.lease.renew(&mut round));
    }
    assert_eq!(disk.writes_at(PULSES), pulses + 10);
    assert_eq!(disk.writes.lock().len(), claimed + 40_000 + 10);
    assert_eq!(*disk.syncs.lock(), 40_000);
    assert!(!first.lease.renew(&mut round), "all is synced");
    *clock.lock() += INTERVAL * 100;
    assert_eq!(disk.writes_at(PULSES), pulses + 10);

    // Not synced: until the kernel has written it back.
    first.write_at(DATA, &[2]).unwrap();
    let rounds = (0..).take_while(|_| first.lease.renew(&mut round)).count();
    assert_eq!(rounds, 15);
    // Under way: as long as it takes.
    first.lease.busy.fetch_add(1, Ordering::SeqCst);
    assert!((0..100).all(|_| first.lease.renew(&mut round)));
}

#[test]
fn the_thread_that_renews_ends_with_the_owner() {
    let (_, one, _) = hosts();
    let disk = Disk::new();
    for _ in 0..3 {
        let first = at_once(open(&disk, &one));
        first.keep_renewed().unwrap();
        first.write_at(DATA, &[1]).unwrap();
    }
    let first = at_once(open(&disk, &one));
    first.keep_renewed().unwrap();
    first.release().unwrap();
    at_once(open(&disk, &one));
}

#[test]
fn a_write_that_waited_in_a_queue_is_checked_again() {
    let (_, one, other) = hosts();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(16 << 20).unwrap();
    let device: Arc<dyn Device> =
        Arc::new(crate::FileDevice::open(file.path(), crate::Access::ReadWrite).unwrap());
    for generation in [1, 2] {
        write_superblock(&*device, &superblock(generation)).unwrap();
    }
    let claim = |host| OwnedDevice::claim(device.clone(), host, Contents::Volume, &mut |_| {});
    let first = claim(one).unwrap();
    first.write_bulk(DATA, &[1; 4096]).unwrap();
    first.sync().unwrap();
    let second = claim(other).unwrap();
    // As a call that was let through before, and is carried out now.
    device.write_bulk(DATA, &[2; 4096]).unwrap();
    assert!(device.sync().is_err());
    let mut byte = [0];
    device.read_at(DATA, &mut byte).unwrap();
    assert_eq!(byte, [1]);
    drop(second);
}
