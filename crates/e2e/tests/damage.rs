//! Damage to the image of a volume, as a user meets it.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Output;

use ramet_block::superblock::{SLOTS, Superblock};
use ramet_e2e::{Bed, ramet_bin, run};

/// Start of the journal, and the magic of a frame with its place in the header (docs/format.md).
const JOURNAL_AT: u64 = 131_072;
const FRAME_MAGIC: &[u8] = b"RmJf";
const FRAME_MAGIC_AT: usize = 8;
const BLOCK_BYTES: u64 = 4096;

fn ramet(args: &[&OsStr]) -> Output {
    run(ramet_bin(), args)
}

fn told(out: &Output) -> String {
    String::from_utf8_lossy(&[&out.stdout[..], &out.stderr].concat()).into_owned()
}

/// Addresses of the blocks of the journal that start a frame.
fn frames(volume: &Path) -> Vec<u64> {
    let image = File::open(volume).expect("the image is there");
    let starts_frame = |addr: &u64| {
        let mut head = [0; 16];
        image.read_exact_at(&mut head, *addr).expect("it is read");
        head[FRAME_MAGIC_AT..].starts_with(FRAME_MAGIC)
    };
    let places = (JOURNAL_AT..JOURNAL_AT + (4 << 20)).step_by(BLOCK_BYTES as usize);
    places.filter(starts_frame).collect()
}

fn zero(volume: &Path, addr: u64) {
    let image = OpenOptions::new().write(true).open(volume);
    let zeros = [0; BLOCK_BYTES as usize];
    let written = image.expect("the image is there");
    written.write_all_at(&zeros, addr).expect("it is written");
}

#[test]
fn a_lost_frame_in_the_middle_of_the_journal_costs_the_changes_from_there_on() {
    let bed = Bed::new("64M");
    let mount = bed.mount(&[]);
    for n in 0..40 {
        let file = File::create(mount.root().join(format!("f{n}"))).expect("there is room");
        file.write_all_at(format!("file {n}").as_bytes(), 0)
            .expect("there is room");
        file.sync_all().expect("it is durable");
    }
    mount.kill_daemon();
    mount.detach_dead();
    let (volume, dir) = (bed.volume(), bed.mount_point());
    let frames = frames(&volume);
    assert!(frames.len() >= 40, "{frames:?}");
    zero(&volume, frames[frames.len() / 2]);

    let [volume, dir] = [&volume, &dir].map(|path| path.as_os_str());
    let refused = ramet(&["mount".as_ref(), volume, dir]);
    let why = told(&refused);
    assert!(
        !refused.status.success() && why.contains("fsck --repair"),
        "{why}"
    );
    let writable = ramet(&[
        "mount".as_ref(),
        volume,
        dir,
        "-o".as_ref(),
        "recovery".as_ref(),
    ]);
    let why = told(&writable);
    assert!(!writable.status.success() && why.contains("'ro'"), "{why}");
    let checked = ramet(&["fsck".as_ref(), volume]);
    let found = told(&checked);
    assert_eq!(checked.status.code(), Some(4), "{found}");
    assert!(
        found.contains("journal frame") && found.contains("--repair"),
        "{found}"
    );

    // All files before the lost frame, and none behind it.
    let is_prefix = |dir: &Path| {
        let has = |n: &usize| match std::fs::read_to_string(dir.join(format!("f{n}"))) {
            Ok(text) => {
                assert_eq!(text, format!("file {n}"));
                true
            }
            Err(_) => false,
        };
        let kept = (0..40).take_while(has).count();
        assert!((10..30).contains(&kept), "{kept} files");
        assert!(
            (kept..40).filter(has).count() <= 1,
            "a file behind the loss"
        );
        kept
    };
    let shown = bed.mount(&["-o", "ro,recovery"]);
    let kept = is_prefix(shown.root());
    shown.umount();
    let repaired = ramet(&["fsck".as_ref(), "--repair".as_ref(), volume]);
    let text = told(&repaired);
    assert_eq!(repaired.status.code(), Some(1), "{text}");
    assert!(text.contains("later changes may be lost"), "{text}");
    bed.fsck();
    let mount = bed.mount(&[]);
    assert_eq!(is_prefix(mount.root()), kept);
    mount.umount();
}

#[test]
fn a_zeroed_copy_of_metadata_costs_nothing_and_fsck_repairs_it() {
    let bed = Bed::new("64M");
    let mount = bed.mount(&[]);
    for n in 0..2000 {
        std::fs::write(mount.root().join(format!("f{n}")), "text").expect("there is room");
    }
    mount.umount();
    let volume = bed.volume();
    let image = File::open(&volume).expect("the image is there");
    let mut head = [0; 4];
    let pages: Vec<u64> = (JOURNAL_AT..64 << 20)
        .step_by(BLOCK_BYTES as usize)
        .filter(|addr| {
            image.read_exact_at(&mut head, *addr).expect("it is read");
            head == *b"RMTp"
        })
        .collect();
    assert!(pages.len() >= 4, "{pages:?}");
    let mut repaired = 0;
    for page in pages {
        let damaged = bed.copied();
        zero(&damaged.volume(), page);
        let mount = damaged.mount(&["-o", "ro"]);
        let text = std::fs::read_to_string(mount.root().join("f1999"));
        assert_eq!(text.expect("the other copy serves"), "text");
        mount.umount();
        let volume = damaged.volume();
        let out = ramet(&["fsck".as_ref(), "--repair".as_ref(), volume.as_os_str()]);
        match out.status.code() {
            // A page of an older checkpoint, or one that the next checkpoint writes anew anyway.
            Some(0) => {}
            Some(1) => repaired += 1,
            _ => panic!("{}", told(&out)),
        }
        damaged.fsck();
    }
    assert!(repaired >= 4, "{repaired}");
}

#[test]
fn a_zeroed_copy_of_a_superblock_is_told_and_fsck_repairs_it() {
    let bed = Bed::new("64M");
    let mount = bed.mount(&[]);
    std::fs::write(mount.root().join("f"), "text").expect("there is room");
    mount.umount();
    for (slot, copy) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let damaged = bed.copied();
        let volume = damaged.volume();
        let path = volume.as_os_str();
        let addr = SLOTS[slot][copy];
        zero(&volume, addr);
        let found = ramet(&["fsck".as_ref(), path]);
        let text = told(&found);
        assert_eq!(found.status.code(), Some(4), "{text}");
        assert!(
            text.contains(&format!("B1 copy of a superblock at byte {addr}")),
            "{text}"
        );
        let repaired = ramet(&["fsck".as_ref(), "--repair".as_ref(), path]);
        assert_eq!(repaired.status.code(), Some(1), "{}", told(&repaired));
        let clean = ramet(&["fsck".as_ref(), path]);
        assert_eq!(clean.status.code(), Some(0), "{}", told(&clean));
        let image = File::open(&volume).expect("the image is there");
        for (slot, addrs) in SLOTS.iter().enumerate() {
            for addr in addrs {
                let mut bytes = [0; BLOCK_BYTES as usize];
                image.read_exact_at(&mut bytes, *addr).expect("it is read");
                Superblock::decode(slot, &bytes).expect("it was written anew");
            }
        }
    }
}
