//! A mount on a device that fails, or that loses data.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::io::{self, IoSlice, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use ramet_block::{Device, MemDevice};
use ramet_fs::control::{SCRUB, SCRUB_START, ScrubRequest, decode_stat_reply};
use ramet_fs::{FormatOptions, OpenOptions, ScrubPage, Volume};
use ramet_fuse::{MountOptions, Transport, mount};
use ramet_sys::control_ioctl;
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags};

const FAIL_WRITES: u8 = 1;
const FAIL_SYNCS: u8 = 2;

/// Fails writes or syncs, after which unsynced data is gone.
struct Faulty {
    memory: MemDevice,
    failing: AtomicU8,
}

impl Faulty {
    fn fail(&self, kind: u8) -> io::Result<()> {
        if self.failing.load(Ordering::SeqCst) == kind {
            return Err(Errno::IO.into());
        }
        Ok(())
    }
}

impl Device for Faulty {
    fn len_bytes(&self) -> u64 {
        self.memory.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.memory.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.fail(FAIL_WRITES)?;
        if self.failing.load(Ordering::SeqCst) == FAIL_SYNCS {
            return Ok(());
        }
        self.memory.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        self.fail(FAIL_SYNCS)
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.memory.discard(addr, len_bytes)
    }
}

fn device() -> Arc<Faulty> {
    let device = Arc::new(Faulty {
        memory: MemDevice::new(64 << 20),
        failing: AtomicU8::new(0),
    });
    let as_device: Arc<dyn Device> = device.clone();
    Volume::format(&as_device, &FormatOptions::default()).unwrap();
    device
}

fn errno(result: io::Result<()>) -> Option<Errno> {
    result.err().and_then(|error| Errno::from_io_error(&error))
}

#[test]
fn no_sync_succeeds_after_a_failed_write_or_sync() {
    for failing in [FAIL_WRITES, FAIL_SYNCS] {
        let device = device();
        let volume = Volume::open(device.clone(), OpenOptions::default()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mounted = mount(volume.clone(), dir.path(), &MountOptions::new("test")).unwrap();
        let (kept, lost) = (dir.path().join("kept"), dir.path().join("lost"));
        fs::write(&kept, "kept").unwrap();
        File::open(&kept).unwrap().sync_all().unwrap();

        let mut file = File::create(&lost).unwrap();
        file.write_all(b"lost").unwrap();
        device.failing.store(failing, Ordering::SeqCst);
        assert_eq!(errno(file.sync_all()), Some(Errno::IO));
        // The result stays the same when the device works again.
        device.failing.store(0, Ordering::SeqCst);
        assert_eq!(errno(file.sync_all()), Some(Errno::IO));
        assert_eq!(
            errno(File::open(&kept).unwrap().sync_all()),
            Some(Errno::IO)
        );
        let refused = [Some(Errno::IO), Some(Errno::ROFS)];
        assert!(refused.contains(&errno(fs::create_dir(dir.path().join("new")))));
        assert!(refused.contains(&errno(fs::remove_file(&kept))));
        assert_eq!(fs::read(&kept).unwrap(), b"kept");
        let why = volume.stats().poisoned.unwrap();
        assert!(why.contains("journal"), "{why}");
        drop(file);
        mounted.unmount().unwrap();
        assert!(volume.close().is_err());
        drop(volume);

        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        assert!(volume.names().lookup(ramet_fs::ROOT_INO, b"kept").is_ok());
        assert!(volume.names().lookup(ramet_fs::ROOT_INO, b"lost").is_err());
        assert_eq!(volume.controls().check().unwrap(), []);
        assert_eq!(volume.tree().verify(&mut |_| {}).unwrap(), [""; 0]);
        volume.close().unwrap();
    }
}

/// In `rustix` 1 `DSYNC` is `O_SYNC`.
const O_DSYNC: OFlags = OFlags::from_bits_retain(1 << 12);
/// The bytes that a program writes when it wants them durable at once.
const DURABLE: &[u8] = b"durable";

/// A file that is created with these flags, and one write with `call`.
fn write_durably(path: &Path, flags: OFlags, call: ReadWriteFlags) -> rustix::io::Result<()> {
    let created = OFlags::CREATE | OFlags::EXCL | flags;
    let file = rustix::fs::open(path, created, Mode::RWXU)?;
    rustix::io::pwritev2(&file, &[IoSlice::new(DURABLE)], 0, call).map(drop)
}

/// The same for a file that has its name later.
fn write_unnamed_durably(dir: &Path, path: &Path) -> io::Result<()> {
    let flags = (OFlags::TMPFILE | O_DSYNC).bits().cast_signed();
    let mut file = fs::OpenOptions::new()
        .write(true)
        .custom_flags(flags)
        .open(dir)?;
    // The name is durable as well, by the sync of the bytes.
    rustix::fs::linkat(&file, "", CWD, path, AtFlags::EMPTY_PATH)?;
    file.write_all(DURABLE)
}

/// The device loses everything from the answer of the last write on.
#[test]
fn bytes_that_a_program_writes_durably_are_there_after_a_power_cut() {
    let (plain, dsync) = (ReadWriteFlags::empty(), ReadWriteFlags::DSYNC);
    let (write_only, both) = (OFlags::WRONLY, OFlags::RDWR);
    let cases = [
        (write_only | O_DSYNC, plain),
        (write_only | OFlags::SYNC, plain),
        (write_only | O_DSYNC | OFlags::APPEND, plain),
        (write_only | O_DSYNC | OFlags::DIRECT, plain),
        (write_only, dsync),
        (write_only | OFlags::DIRECT, dsync),
        (both | O_DSYNC, plain),
        (both | OFlags::SYNC | OFlags::DIRECT, plain),
        (both | OFlags::DIRECT, dsync),
        (both, dsync),
    ];
    for transport in [Transport::Device, Transport::Ring] {
        for case in 0..=cases.len() {
            let device = device();
            let volume = Volume::open(device.clone(), OpenOptions::default()).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let options = MountOptions {
                transport,
                ..MountOptions::new("test")
            };
            let mounted = mount(volume.clone(), dir.path(), &options).unwrap();
            let path = dir.path().join("file");
            match cases.get(case) {
                Some(&(flags, call)) => write_durably(&path, flags, call).unwrap(),
                None => write_unnamed_durably(dir.path(), &path).unwrap(),
            }
            device.failing.store(FAIL_SYNCS, Ordering::SeqCst);
            mounted.unmount().unwrap();
            let _ = volume.close();
            drop(volume);
            device.failing.store(0, Ordering::SeqCst);

            let volume = Volume::open(device, OpenOptions::default()).unwrap();
            let found = volume.names().lookup(ramet_fs::ROOT_INO, b"file");
            let ino = found.map(|attr| attr.ino);
            let text = ino.and_then(|ino| volume.files().read(ino, 0, 100));
            assert!(
                text.is_ok_and(|text| text == DURABLE),
                "{transport:?} {:?}",
                cases.get(case)
            );
            volume.close().unwrap();
        }
    }
}

/// The answer tells of a sync that fails.
#[test]
fn a_durable_write_fails_with_its_sync() {
    for transport in [Transport::Device, Transport::Ring] {
        let device = device();
        let volume = Volume::open(device.clone(), OpenOptions::default()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let options = MountOptions {
            transport,
            ..MountOptions::new("test")
        };
        let mounted = mount(volume.clone(), dir.path(), &options).unwrap();
        device.failing.store(FAIL_SYNCS, Ordering::SeqCst);
        let path = dir.path().join("file");
        let written = write_durably(&path, OFlags::WRONLY, ReadWriteFlags::DSYNC);
        assert_eq!(written, Err(Errno::IO), "{transport:?}");
        mounted.unmount().unwrap();
        assert!(volume.close().is_err());
    }
}

fn scrub(dir: &Path) -> Vec<ramet_fs::Damaged> {
    let dir = File::open(dir).unwrap();
    let mut found = Vec::new();
    let mut flags = SCRUB_START;
    loop {
        let mut bytes = ScrubRequest { flags, session: 7 }.encode();
        control_ioctl(&dir, SCRUB, &mut bytes).unwrap();
        let page: ScrubPage = serde_json::from_str(decode_stat_reply(&bytes).unwrap()).unwrap();
        found.extend(page.found);
        if page.is_last {
            assert!(page.done_bytes > 0);
            return found;
        }
        flags = 0;
    }
}

#[test]
fn a_scrub_names_the_file_that_a_flipped_bit_harms() {
    let device = device();
    let volume = Volume::open(device.clone(), OpenOptions::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mounted = mount(volume.clone(), dir.path(), &MountOptions::new("test")).unwrap();
    fs::create_dir(dir.path().join("d")).unwrap();
    let mark = *b"here it is, once";
    let mut bytes: Vec<u8> = (0..1u32 << 20)
        .map(|n| (n.wrapping_mul(n) >> 3) as u8)
        .collect();
    bytes[500_000..500_016].copy_from_slice(&mark);
    fs::write(dir.path().join("d/file"), &bytes).unwrap();
    fs::write(dir.path().join("d/other"), "x").unwrap();
    volume.checkpoint().unwrap();
    assert_eq!(scrub(dir.path()), []);

    let mut image = vec![0; 64 << 20];
    device.read_at(0, &mut image).unwrap();
    let at = image.windows(16).position(|window| window == mark);
    let at = at.expect("new volumes of the library are not compressed") as u64;
    device.memory.write_at(at, b"H").unwrap();
    let found = scrub(dir.path());
    let [one] = &found[..] else {
        panic!("{found:?}")
    };
    assert!(!one.is_repaired && one.addr <= at && at < one.addr + (64 << 10));
    let location = one.location.as_deref().unwrap();
    assert!(location.starts_with("/d/file, bytes "), "{location}");

    device.memory.write_at(at, b"h").unwrap();
    device.memory.write_at(98_304 + 30, &[0xff]).unwrap();
    let found = scrub(dir.path());
    assert!(found.len() == 1 && found[0].is_repaired, "{found:?}");
    assert_eq!(scrub(dir.path()), []);
    mounted.unmount().unwrap();
    volume.close().unwrap();
}
