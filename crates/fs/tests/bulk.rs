//! Costs of large writes at the device, in bytes.
//!
//! `RAMET_BULK_MIB` sets the size of the file, `RAMET_BULK_KIB` that of a request.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ramet_block::{Device, MemDevice};
use ramet_fs::{FormatOptions, Ino, Kind, NewInode, OpenOptions, ROOT_INO, Volume};

/// Counts the requests to the device.
struct Counted {
    device: MemDevice,
    written: AtomicU64,
    read: AtomicU64,
    writes: AtomicU64,
    reads: AtomicU64,
    syncs: AtomicU64,
    /// Longer reads fail; 0 for none.
    longest_read: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
#[expect(dead_code, reason = "printed")]
struct Counts {
    written: u64,
    read: u64,
    writes: u64,
    reads: u64,
    syncs: u64,
}

impl Counted {
    fn take(&self) -> Counts {
        let take = |counter: &AtomicU64| counter.swap(0, Ordering::SeqCst);
        Counts {
            written: take(&self.written),
            read: take(&self.read),
            writes: take(&self.writes),
            reads: take(&self.reads),
            syncs: take(&self.syncs),
        }
    }
}

impl Device for Counted {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read.fetch_add(buf.len() as u64, Ordering::SeqCst);
        self.reads.fetch_add(1, Ordering::SeqCst);
        let longest = self.longest_read.load(Ordering::SeqCst);
        if longest > 0 && buf.len() as u64 > longest {
            return Err(io::Error::other("a bad sector somewhere in it"));
        }
        self.device.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.written.fetch_add(buf.len() as u64, Ordering::SeqCst);
        self.writes.fetch_add(1, Ordering::SeqCst);
        self.device.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        self.syncs.fetch_add(1, Ordering::SeqCst);
        self.device.sync()
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.device.discard(addr, len_bytes)
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

fn write_all(volume: &Volume, file: Ino, len: u64, salt: u64) {
    let request = number("RAMET_BULK_KIB", 1024) << 10;
    for offset in (0..len).step_by(usize::try_from(request).unwrap()) {
        let mut state = offset ^ salt;
        let data: Vec<u8> = (0..request / 8)
            .flat_map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                state.to_be_bytes()
            })
            .collect();
        volume.files().write(file, offset, &data, None).unwrap();
    }
}

#[test]
fn large_writes_are_written_once_and_overwriting_reads_next_to_nothing() {
    let len = number("RAMET_BULK_MIB", 192) << 20;
    let device = Arc::new(Counted {
        device: MemDevice::new(3 * len + (64 << 20)),
        written: AtomicU64::new(0),
        read: AtomicU64::new(0),
        writes: AtomicU64::new(0),
        reads: AtomicU64::new(0),
        syncs: AtomicU64::new(0),
        longest_read: AtomicU64::new(0),
    });
    let open = || {
        let device: Arc<dyn Device> = device.clone();
        Volume::open(device, OpenOptions::default()).unwrap()
    };
    let dynamic: Arc<dyn Device> = device.clone();
    Volume::format(&dynamic, &FormatOptions::default()).unwrap();
    let volume = open();
    let new = NewInode::new(Kind::Regular, 0o644);
    let file = volume.names().create(ROOT_INO, b"file", &new).unwrap().ino;
    volume.checkpoint().unwrap();

    let at_most = |what: &str, bytes: u64, permille: u64| {
        let share = bytes as f64 / len as f64;
        assert!(
            bytes * 1000 <= len * permille,
            "{what}: {share:.4} of the file"
        );
    };
    device.take();
    write_all(&volume, file, len, 1);
    volume.sync_all().unwrap();
    let synced = device.take();
    volume.checkpoint().unwrap();
    let settled = device.take();
    println!("write and fsync {synced:?}, checkpoint {settled:?}");
    at_most("write and sync", synced.written, 1050);
    at_most(
        "with the checkpoint",
        synced.written + settled.written,
        1050,
    );

    drop(volume);
    let volume = open();
    let file = volume.names().lookup(ROOT_INO, b"file").unwrap().ino;
    device.take();
    let mut at = 0;
    while at < len {
        at += volume.files().read(file, at, 1 << 20).unwrap().len() as u64;
    }
    let read = device.take();
    let cached = volume.stats().tree.cached_bytes;
    println!("cold read {read:?}, cached {cached}");
    at_most("a cold read", read.read, 1050);
    at_most("what it leaves in the cache", cached, 200);
    drop(volume);

    // The reads are those of the kernel: each request is a leaf, which comes with its index.
    let volume = open();
    let file = volume.names().lookup(ROOT_INO, b"file").unwrap().ino;
    device.take();
    let mut place = vec![0; 512 << 10];
    for at in (0..len).step_by(place.len()) {
        assert_eq!(
            volume.files().read_into(file, at, &mut place).unwrap(),
            place.len()
        );
    }
    let read = device.take();
    println!("cold read, leaf by leaf {read:?}");
    at_most("a cold read, leaf by leaf", read.read, 1020);
    let leaves = len / place.len() as u64;
    assert!(read.reads <= leaves + leaves / 10, "{read:?}");
    drop(volume);

    // A damaged part of a leaf does not harm readers of other parts.
    let volume = open();
    let file = volume.names().lookup(ROOT_INO, b"file").unwrap().ino;
    device.longest_read.store(500 << 10, Ordering::SeqCst);
    for at in (0..len).step_by(place.len()) {
        assert_eq!(
            volume.files().read_into(file, at, &mut place).unwrap(),
            place.len()
        );
    }
    device.longest_read.store(0, Ordering::SeqCst);
    drop(volume);

    // A leaf is not read whole for its end either.
    let volume = open();
    let file = volume.names().lookup(ROOT_INO, b"file").unwrap().ino;
    let mut part = vec![0; 128 << 10];
    let ends = (place.len() as u64..=len).step_by(place.len());
    volume.files().read_into(file, 0, &mut part).unwrap();
    device.take();
    for end in ends {
        let at = end - part.len() as u64;
        assert_eq!(
            volume.files().read_into(file, at, &mut part).unwrap(),
            part.len()
        );
    }
    let read = device.take();
    println!("cold read of the ends of leaves {read:?}");
    assert!(read.read <= leaves * (200 << 10), "{read:?}");
    drop(volume);

    let volume = open();
    let file = volume.names().lookup(ROOT_INO, b"file").unwrap().ino;
    device.take();
    write_all(&volume, file, len, 2);
    volume.checkpoint().unwrap();
    let over = device.take();
    println!("overwrite and checkpoint {over:?}");
    at_most("overwriting writes", over.written, 1050);
    at_most("overwriting reads", over.read, 10);

    volume.checkpoint().unwrap();
    let allocated = volume.stats().tree.allocated_bytes;
    println!("allocated {allocated}");
    at_most("what was overwritten is free", allocated, 1050);
    assert_eq!(volume.controls().check().unwrap(), []);
}
