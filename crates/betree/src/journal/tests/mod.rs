//! Tests of the journal on simulated devices.
//!
//! `CrashDevice` keeps writes that are not synced apart, and makes the image of a crash from the
//! durable bytes plus any choice of the 512-byte sectors written since. Seeds are printed when a
//! test fails, and taken from `RAMET_SEED`.

mod commit;
mod giving_back;
mod judge;
mod recovery;

use std::io;

use parking_lot::Mutex;
use ramet_block::MemDevice;

use super::*;

const UUID: u64 = 0x1122_3344_5566_7788;
const EPOCH: u64 = 5;
const BLOCK: usize = BLOCK_BYTES as usize;
const SECTOR: usize = 512;
/// The region does not start at 0, so that addresses and offsets cannot be mixed up unnoticed.
const REGION: Extent = Extent {
    addr: 8 * BLOCK_BYTES,
    len: 64 * BLOCK_BYTES,
};
const DEVICE_BYTES: u64 = REGION.addr + REGION.len + 8 * BLOCK_BYTES;

type Records = Vec<(u64, Vec<u8>)>;

/// A small generator of its own keeps seeds stable across versions of crates.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

fn first_seed() -> u64 {
    std::env::var("RAMET_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(1)
}

struct CrashDevice {
    state: Mutex<CrashState>,
}

struct CrashState {
    durable: Vec<u8>,
    /// Writes since the last sync.
    unsynced: Vec<(usize, Vec<u8>)>,
}

impl CrashDevice {
    fn new() -> Arc<Self> {
        let bytes = vec![0; usize::try_from(DEVICE_BYTES).unwrap()];
        Arc::new(Self {
            state: Mutex::new(CrashState {
                durable: bytes,
                unsynced: Vec::new(),
            }),
        })
    }

    /// An image that a crash may leave now: each sector of each unsynced write is there or not.
    fn crash(&self, rng: &mut Rng) -> MemDevice {
        let state = self.state.lock();
        let mut bytes = state.durable.clone();
        let keep_of_8 = rng.below(9);
        for (at, data) in &state.unsynced {
            for (index, sector) in data.chunks(SECTOR).enumerate() {
                if rng.below(8) < keep_of_8 {
                    let start = at + index * SECTOR;
                    bytes[start..start + sector.len()].copy_from_slice(sector);
                }
            }
        }
        drop(state);
        device_of(&bytes)
    }
}

impl Device for CrashDevice {
    fn len_bytes(&self) -> u64 {
        DEVICE_BYTES
    }

    fn read_at(&self, _addr: u64, _buf: &mut [u8]) -> io::Result<()> {
        Err(io::Error::other("a journal that is written is not read"))
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.state
            .lock()
            .unsynced
            .push((usize::try_from(addr).unwrap(), buf.to_vec()));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        for (at, data) in std::mem::take(&mut state.unsynced) {
            state.durable[at..at + data.len()].copy_from_slice(&data);
        }
        Ok(())
    }

    fn discard(&self, _addr: u64, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }
}

fn device_of(bytes: &[u8]) -> MemDevice {
    let dev = MemDevice::new(bytes.len() as u64);
    dev.write_at(0, bytes).unwrap();
    dev
}

fn bytes_of(dev: &dyn Device) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(dev.len_bytes()).unwrap()];
    dev.read_at(0, &mut bytes).unwrap();
    bytes
}

fn memory() -> Arc<MemDevice> {
    Arc::new(MemDevice::new(DEVICE_BYTES))
}

fn open(dev: Arc<dyn Device>, at: JournalPos) -> Journal {
    Journal::open(dev, REGION, UUID, EPOCH, Codec::Lz4, at)
}

fn replay_as(
    dev: &dyn Device,
    uuid: u64,
    epoch: u64,
    start: JournalPos,
) -> Result<(Records, JournalPos)> {
    let mut found = Vec::new();
    let end = Journal::replay(
        dev,
        REGION,
        (uuid, epoch),
        start,
        None,
        &mut |seq, record| {
            found.push((seq, record.to_vec()));
            Ok(())
        },
    )?;
    Ok((found, end))
}

fn replay(dev: &dyn Device, start: JournalPos) -> (Records, JournalPos) {
    replay_as(dev, UUID, EPOCH, start).unwrap()
}

fn seqs(records: &Records) -> Vec<u64> {
    records.iter().map(|(seq, _)| *seq).collect()
}

/// Bytes that no codec makes fewer.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng(seed);
    (0..len).map(|_| rng.next().to_le_bytes()[0]).collect()
}

/// Appends and commits a record of `len` bytes.
fn put(journal: &Journal, seq: u64, len: usize) {
    journal.append(seq, &[&noise(seq, len)], false);
    journal.commit(seq).unwrap();
}

/// Bytes that a codec compresses to a tenth, about.
fn text(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng(seed);
    let lines = (0..)
        .flat_map(|_| format!("put {:04x} of a file like others;", rng.below(65536)).into_bytes());
    lines.take(len).collect()
}

/// The place of a frame in the device.
fn place_of(at: JournalPos) -> usize {
    usize::try_from(REGION.addr + at.offset % REGION.len).unwrap()
}
