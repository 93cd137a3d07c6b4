//! A sector of a leaf cannot be read any more, and another structure of the volume is damaged too.
//! The check tells of both and goes on, and a repair mends the other one.

use std::io;
use std::sync::Arc;

use ramet_block::superblock::read_superblock;
use ramet_block::{Budget, Codec, Device, Overlay};
use ramet_fs::{
    Examination, Examined, FormatOptions, Kind, NewInode, OpenOptions, ROOT_INO, TreeShape, Volume,
    examine,
};
use ramet_sim::SparseDevice;

const BLOCK_BYTES: u64 = 4096;
const DEVICE_BYTES: u64 = 16 << 20;
const FILE_BYTES: u64 = 100_000;
/// Magic bytes of a run, of a page of a table, and of a journal frame, which has them in its header.
const RUN_MAGIC: &[u8] = b"RRUN";
const PAGE_MAGIC: &[u8] = b"RMTp";
const FRAME_MAGIC: &[u8] = b"RmJf";
const FRAME_MAGIC_AT: usize = 8;

fn options() -> OpenOptions {
    OpenOptions {
        shape: Some(TreeShape {
            leaf_bytes: 64 << 10,
            block_bytes: 8 << 10,
            fanout: 8,
            buffer_bytes: 256 << 10,
            memory_bytes: 256 << 10,
            codec: Codec::Raw,
            ..TreeShape::default()
        }),
        compression: Some(Codec::Raw),
        manual: true,
        ..OpenOptions::default()
    }
}

fn write_file(volume: &Volume, number: u64) {
    let new = NewInode::new(Kind::Regular, 0o644);
    let name = format!("f{number}");
    let file = volume.names().create(ROOT_INO, name.as_bytes(), &new);
    let mix = |at: u64| (at.wrapping_mul(at ^ number ^ 0x9e37_79b9) >> 7).to_le_bytes()[0];
    let data: Vec<u8> = (0..FILE_BYTES).map(mix).collect();
    let file = file.expect("there is room").ino;
    let written = volume.files().write(file, 0, &data, None);
    written.expect("there is room");
}

/// A volume of some leaves that was not closed. Its journal holds some frames.
fn volume() -> SparseDevice {
    let device = Arc::new(SparseDevice::new(DEVICE_BYTES));
    let as_device: Arc<dyn Device> = device.clone();
    let format = FormatOptions {
        compression: Some(Codec::Raw),
        shape: options().shape,
        journal_bytes: Some(4 << 20),
        ..FormatOptions::default()
    };
    Volume::format(&as_device, &format).expect("it is large enough");
    let volume = Volume::open(as_device, options()).expect("it was made");
    (0..20).for_each(|number| write_file(&volume, number));
    for _ in 0..4 {
        volume.checkpoint().expect("there is room");
    }
    for number in 20..28 {
        write_file(&volume, number);
        volume.sync_all().expect("it is durable");
    }
    // The process dies.
    device.image()
}

/// Addresses of the blocks from `start` to `end` with `magic` at an offset.
fn blocks_with(image: &SparseDevice, magic: &[u8], at: usize, start: u64, end: u64) -> Vec<u64> {
    let has_magic = |addr: &u64| {
        let mut head = [0; 16];
        image.read_at(*addr, &mut head).expect("it is read");
        head[at..].starts_with(magic)
    };
    let blocks = (start..end).step_by(usize::try_from(BLOCK_BYTES).expect("it is small"));
    blocks.filter(has_magic).collect()
}

fn zero(image: &SparseDevice, addr: u64) {
    let zeros = [0; 4096];
    image.write_at(addr, &zeros).expect("it is written");
}

fn examined(device: Arc<dyn Device>, repairs: bool, rebuilds: bool) -> Result<Examined, String> {
    let budget = Budget::of_volumes(64 << 20);
    let device = match repairs {
        true => device,
        false => Arc::new(Overlay::new(device, &budget)),
    };
    let examination = Examination {
        repairs,
        rebuilds,
        files: true,
        open: options(),
    };
    let done = examine(device, &examination, &budget, &mut |_, _, _| {});
    done.map_err(|error| error.to_string())
}

/// The front of a leaf of file contents: with zeros there, all but the leaf can be checked.
fn front_of_a_leaf(image: &SparseDevice) -> u64 {
    let journal = read_superblock(image).expect("it is whole").journal;
    let runs = blocks_with(image, RUN_MAGIC, 0, journal.end(), DEVICE_BYTES);
    let is_needed = |addr: &u64| {
        let hurt = image.image();
        zero(&hurt, *addr);
        match examined(Arc::new(hurt), false, false) {
            Ok(found) => found.violations.iter().any(|line| line.starts_with("T9")),
            Err(_) => false,
        }
    };
    runs.into_iter().find(is_needed).expect("there are leaves")
}

/// The lines of a check without that of the files, which ends at the lost leaf.
fn of_nodes(found: &Examined) -> Vec<&str> {
    let lines = found.violations.iter().map(String::as_str);
    lines.filter(|line| !line.starts_with("F1")).collect()
}

/// A device one sector of which takes writes and keeps its bytes.
struct Stuck {
    device: Arc<dyn Device>,
    addr: u64,
}

impl Device for Stuck {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }
    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.device.read_at(addr, buf)
    }
    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        match addr == self.addr {
            true => Ok(()),
            false => self.device.write_at(addr, buf),
        }
    }
    fn sync(&self) -> io::Result<()> {
        self.device.sync()
    }
    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.device.discard(addr, len_bytes)
    }
}

#[test]
fn a_copy_of_a_superblock_that_no_write_mends_is_told_after_a_repair_too() {
    let image = volume();
    let addr = 0;
    zero(&image, addr);
    let device: Arc<dyn Device> = Arc::new(image);
    let is_told = |found: &Examined| found.violations.iter().any(|line| line.starts_with("B1"));
    let stuck: Arc<dyn Device> = Arc::new(Stuck {
        device: device.clone(),
        addr,
    });
    for repairs in [false, true] {
        let left = examined(stuck.clone(), repairs, false).expect("it is checked");
        assert!(is_told(&left), "{left:?}");
    }
    for is_bad in [true, false] {
        let left = examined(device.clone(), is_bad, false).expect("it is checked");
        assert!(!is_told(&left), "{left:?}");
    }
}

fn opens(device: Arc<dyn Device>) {
    let volume = Volume::open(device, options()).expect("it opens");
    assert_eq!(volume.loss(), None);
    write_file(&volume, 100);
    volume.close().expect("it closes");
}

#[test]
fn a_sector_of_a_leaf_that_cannot_be_read_keeps_nobody_from_a_repair_of_the_journal() {
    let image = volume();
    let superblock = read_superblock(&image).expect("it is whole");
    let journal = superblock.journal;
    // The journal has not come to its end yet: the frames behind the checkpoint are in one piece.
    let start = journal.addr + superblock.journal_start.offset % journal.len;
    let frames = blocks_with(&image, FRAME_MAGIC, FRAME_MAGIC_AT, start, journal.end());
    assert!(frames.len() > 4, "{frames:?}");
    image.spoil_sector(front_of_a_leaf(&image));
    zero(&image, frames[frames.len() / 2]);
    let device: Arc<dyn Device> = Arc::new(image);

    let found = examined(device.clone(), false, false).expect("it is checked");
    let lines = of_nodes(&found);
    assert_eq!(lines.len(), 2, "{found:?}");
    assert!(lines[0].contains("journal") && lines[1].starts_with("T9 node"));
    assert!(lines[1].contains("a sector cannot be read"), "{found:?}");

    let left = examined(device.clone(), true, false).expect("it is repaired");
    let lines = of_nodes(&left);
    assert!(
        lines.len() == 1 && lines[0].starts_with("T9 node"),
        "{left:?}"
    );
    assert_eq!(left.lost.len(), 1, "{left:?}");
    opens(device);
}

#[test]
fn a_sector_of_a_leaf_that_cannot_be_read_keeps_nobody_from_a_rebuild_of_the_tables() {
    let image = volume();
    let pages = blocks_with(&image, PAGE_MAGIC, 0, 0, DEVICE_BYTES);
    image.spoil_sector(front_of_a_leaf(&image));
    pages.iter().for_each(|addr| zero(&image, *addr));
    let device: Arc<dyn Device> = Arc::new(image);
    examined(device.clone(), false, false).expect_err("it has no tables");

    for repairs in [false, true] {
        let left = examined(device.clone(), repairs, true).expect("it is rebuilt");
        let lines = of_nodes(&left);
        assert!(
            lines.len() == 1 && lines[0].starts_with("T9 node"),
            "{left:?}"
        );
    }
    opens(device);
}
