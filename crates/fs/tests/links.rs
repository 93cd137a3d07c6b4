//! Clones of directories with so many hard links that they are staged ahead.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use ramet_block::{Device, MemDevice};
use ramet_fs::{
    Caller, CloneMode, Error, FormatOptions, Ino, Kind, NewInode, OpenOptions, ROOT_INO, Volume,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const LINKS: u32 = 12_000;

/// A device that takes a number of changes and then none.
struct Mortal {
    medium: Arc<dyn Device>,
    left: AtomicI64,
}

impl Mortal {
    fn change(&self) -> io::Result<()> {
        match self.left.fetch_sub(1, Ordering::Relaxed) {
            1.. => Ok(()),
            _ => Err(io::Error::other("dead")),
        }
    }
}

impl Device for Mortal {
    fn len_bytes(&self) -> u64 {
        self.medium.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.medium.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.change()?;
        self.medium.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        self.change()?;
        self.medium.sync()
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.medium.discard(addr, len_bytes)
    }
}

struct Fixture {
    device: Arc<dyn Device>,
    volume: Arc<Volume>,
}

impl Fixture {
    /// `tree` with as many files as there are links to them in `store`, both in `top`.
    fn new() -> Self {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(96 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(Arc::clone(&device), OpenOptions::default()).unwrap();
        let fixture = Self { device, volume };
        let top = fixture.make(ROOT_INO, "top", Kind::Directory);
        let [store, tree] = ["store", "tree"].map(|name| fixture.make(top, name, Kind::Directory));
        for n in 0..LINKS {
            let file = fixture.make(store, &n.to_string(), Kind::Regular);
            let content = n.to_string();
            fixture
                .volume
                .files()
                .write(file, 0, content.as_bytes(), None)
                .unwrap();
            let linked = fixture.volume.names().link(file, tree, content.as_bytes());
            assert_eq!(linked.unwrap().nlink, 2);
        }
        fixture
    }

    fn make(&self, dir: Ino, name: &str, kind: Kind) -> Ino {
        let new = NewInode::new(kind, 0o755);
        self.volume
            .names()
            .create(dir, name.as_bytes(), &new)
            .unwrap()
            .ino
    }

    fn find(&self, path: &str) -> Ino {
        let names = path.split('/').filter(|name| !name.is_empty());
        names.fold(ROOT_INO, |dir, name| {
            self.volume
                .names()
                .lookup(dir, name.as_bytes())
                .unwrap()
                .ino
        })
    }

    fn clone_to(&self, source: &str, dir: &str, name: &str) {
        let (source, dir) = (self.find(source), self.find(dir));
        self.volume
            .trees()
            .clone_entry(
                &Caller::root(),
                source,
                dir,
                name.as_bytes(),
                CloneMode::Replace,
            )
            .unwrap();
    }

    /// Every twentieth file below `dir` has `links` names and its first contents.
    fn expect(&self, dir: &str, links: u32) {
        for n in (0..LINKS).step_by(20) {
            let file = self.find(&format!("{dir}/{n}"));
            assert_eq!(
                self.volume.attributes().getattr(file).unwrap().nlink,
                links,
                "{dir}/{n}"
            );
            let content = self.volume.files().read(file, 0, 100).unwrap();
            assert_eq!(content, n.to_string().as_bytes(), "{dir}/{n}");
        }
    }

    fn reopen(&mut self) {
        self.volume.close().unwrap();
        self.volume = Volume::open(Arc::clone(&self.device), OpenOptions::default()).unwrap();
        assert_eq!(self.volume.controls().check().unwrap(), []);
    }
}

#[test]
fn a_directory_with_more_links_than_a_batch_takes_is_cloned() {
    let mut fixture = Fixture::new();
    fixture.clone_to("top/tree", "top", "copy");
    fixture.expect("top/tree", 2);
    fixture.expect("top/copy", 1);
    let (ours, theirs) = (fixture.find("top/tree/7"), fixture.find("top/copy/7"));
    assert_ne!(ours, theirs);
    fixture
        .volume
        .files()
        .write(theirs, 0, b"other", None)
        .unwrap();
    assert_eq!(fixture.volume.files().read(ours, 0, 9).unwrap(), b"7");
    fixture.reopen();
    fixture.expect("top/store", 2);
    // The copy has its links inside.
    fixture.clone_to("top/copy", "top", "next");
    fixture.expect("top/next", 1);
    // The destination is around the source, and around its shared inodes.
    fixture.clone_to("top/store", "top", "tree");
    fixture.expect("top/tree", 1);
    fixture.reopen();
    fixture.expect("top/store", 1);
    fixture.expect("top/tree", 1);
}

#[test]
fn a_clone_may_replace_the_directory_of_its_links() {
    let mut fixture = Fixture::new();
    // The source is a clone root, which has the shared inodes.
    fixture.clone_to("top", "", "fork");
    fixture.clone_to("fork/tree", "", "fork");
    fixture.expect("fork", 1);
    fixture.reopen();
    fixture.expect("fork", 1);
}

#[test]
fn a_clone_that_is_refused_for_room_erases_its_stage() {
    let mut fixture = Fixture::new();
    let allocated = |fixture: &Fixture| {
        fixture.volume.checkpoint().unwrap();
        fixture.volume.checkpoint().unwrap();
        fixture.volume.stats().tree.allocated_bytes
    };
    fixture.make(ROOT_INO, "filler", Kind::Regular);
    let fill = |fixture: &Fixture, at, block: &[u8]| {
        let filler = fixture.find("filler");
        fixture.volume.files().write(filler, at, block, None)
    };
    let mut rng = StdRng::seed_from_u64(7);
    let mut block = vec![0; 256 << 10];
    rng.fill(&mut block[..]);
    let mut at = 0;
    let (mut refused, mut cloned) = (0, 0);
    // The room shrinks: the clone is refused before the first batch, between two, or not at all.
    while refused < 16 && fill(&fixture, at, &block).is_ok() {
        at += block.len() as u64;
        if at < 57 << 20 {
            continue;
        }
        let before = allocated(&fixture);
        let (source, dir) = (fixture.find("top/tree"), fixture.find("top"));
        let root = Caller::root();
        let done =
            fixture
                .volume
                .trees()
                .clone_entry(&root, source, dir, b"copy", CloneMode::Replace);
        match done {
            Ok(_) => {
                cloned += 1;
                fixture
                    .volume
                    .trees()
                    .remove_tree(&root, dir, b"copy")
                    .unwrap();
                fixture.volume.forget_all();
            }
            Err(error) => {
                refused += 1;
                assert_eq!(format!("{error:?}"), "Tree(NoSpace)");
                assert!(fixture.volume.names().lookup(dir, b"copy").is_err());
                let after = allocated(&fixture);
                assert!(after < before + (192 << 10), "{before} bytes, then {after}");
            }
        }
    }
    println!("cloned {cloned} times, refused {refused} times");
    assert!(refused > 0 && cloned > 0);
    assert_eq!(fixture.volume.controls().check().unwrap(), []);
    fixture.reopen();
    fixture.expect("top/tree", 2);
}

#[test]
fn a_crash_on_the_way_leaves_all_of_a_clone_or_nothing() {
    let fixture = Fixture::new();
    fixture.volume.close().unwrap();
    let mut image = vec![0; usize::try_from(fixture.device.len_bytes()).unwrap()];
    fixture.device.read_at(0, &mut image).unwrap();
    let mut nothing = 0;
    for changes in (0..).step_by(3) {
        let medium: Arc<dyn Device> = Arc::new(MemDevice::new(image.len() as u64));
        medium.write_at(0, &image).unwrap();
        let mortal = Arc::new(Mortal {
            medium: Arc::clone(&medium),
            left: AtomicI64::new(i64::MAX),
        });
        let options = OpenOptions {
            manual: true,
            sync_each: true,
            ..OpenOptions::default()
        };
        let volume = Volume::open(mortal.clone(), options).unwrap();
        let before = Fixture {
            device: mortal.clone(),
            volume,
        };
        let (source, dir) = (before.find("top/tree"), before.find("top"));
        mortal.left.store(changes, Ordering::Relaxed);
        let root = Caller::root();
        let done =
            before
                .volume
                .trees()
                .clone_entry(&root, source, dir, b"copy", CloneMode::Replace);
        mortal.left.store(0, Ordering::Relaxed);
        drop(before);
        let volume = Volume::open(Arc::clone(&medium), OpenOptions::default()).unwrap();
        let after = Fixture {
            device: medium,
            volume,
        };
        assert_eq!(
            after.volume.controls().check().unwrap(),
            [],
            "{changes} changes"
        );
        after.expect("top/tree", 2);
        let dir = after.find("top");
        match after.volume.names().lookup(dir, b"copy") {
            Ok(_) => after.expect("top/copy", 1),
            Err(error) => {
                assert!(matches!(error, Error::NotFound), "{error}");
                assert!(done.is_err(), "it was durable");
                nothing += 1;
            }
        }
        if done.is_ok() {
            break;
        }
    }
    println!("nothing of it {nothing} times");
    // Each batch takes two changes at least.
    assert!(nothing >= 3);
}
