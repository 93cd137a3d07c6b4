//! Clones of directories with more hard links than a batch takes.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use ramet_block::{Device, MemDevice};
use ramet_fs::{Caller, FormatOptions, Ino, Kind, NewInode, OpenOptions, ROOT_INO, Volume};

const LINKS: u32 = 12_000;

struct Fixture {
    device: Arc<dyn Device>,
    volume: Arc<Volume>,
}

impl Fixture {
    /// `work` with as many files as there are links to them in `store`, both in `top`.
    fn new() -> Self {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(96 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(Arc::clone(&device), OpenOptions::default()).unwrap();
        let fixture = Self { device, volume };
        let top = fixture.make(ROOT_INO, "top", Kind::Directory);
        let [store, work] = ["store", "work"].map(|name| fixture.make(top, name, Kind::Directory));
        for n in 0..LINKS {
            let file = fixture.make(store, &n.to_string(), Kind::Regular);
            let content = n.to_string();
            fixture
                .volume
                .write(file, 0, content.as_bytes(), false)
                .unwrap();
            let linked = fixture.volume.link(file, work, content.as_bytes());
            assert_eq!(linked.unwrap().nlink, 2);
        }
        fixture
    }

    fn make(&self, dir: Ino, name: &str, kind: Kind) -> Ino {
        let new = NewInode {
            kind,
            perm: 0o755,
            uid: 0,
            gid: 0,
            rdev: 0,
            target: b"",
        };
        self.volume.create(dir, name.as_bytes(), &new).unwrap().ino
    }

    fn find(&self, path: &str) -> Ino {
        let names = path.split('/').filter(|name| !name.is_empty());
        names.fold(ROOT_INO, |dir, name| {
            self.volume.lookup(dir, name.as_bytes()).unwrap().ino
        })
    }

    fn clone_to(&self, source: &str, dir: &str, name: &str) {
        let (source, dir) = (self.find(source), self.find(dir));
        self.volume
            .clone_entry(&Caller::root(), source, dir, name.as_bytes(), false)
            .unwrap();
    }

    /// Every twentieth file below `dir` is that of `links` names and has what it was made with.
    fn expect(&self, dir: &str, links: u32) {
        for n in (0..LINKS).step_by(20) {
            let file = self.find(&format!("{dir}/{n}"));
            assert_eq!(self.volume.getattr(file).unwrap().nlink, links, "{dir}/{n}");
            let content = self.volume.read(file, 0, 100).unwrap();
            assert_eq!(content, n.to_string().as_bytes(), "{dir}/{n}");
        }
    }

    fn reopen(&mut self) {
        self.volume.close().unwrap();
        self.volume = Volume::open(Arc::clone(&self.device), OpenOptions::default()).unwrap();
        assert_eq!(self.volume.check().unwrap(), []);
    }
}

#[test]
fn a_directory_with_more_links_than_a_batch_takes_is_cloned() {
    let mut fixture = Fixture::new();
    fixture.clone_to("top/work", "top", "copy");
    fixture.expect("top/work", 2);
    fixture.expect("top/copy", 1);
    let (ours, theirs) = (fixture.find("top/work/7"), fixture.find("top/copy/7"));
    assert_ne!(ours, theirs);
    fixture.volume.write(theirs, 0, b"other", false).unwrap();
    assert_eq!(fixture.volume.read(ours, 0, 9).unwrap(), b"7");
    fixture.reopen();
    fixture.expect("top/store", 2);
    // The copy has its links inside.
    fixture.clone_to("top/copy", "top", "next");
    fixture.expect("top/next", 1);
    // All around the source, and where its bodies are.
    fixture.clone_to("top/store", "top", "work");
    fixture.expect("top/work", 1);
    fixture.reopen();
    fixture.expect("top/store", 1);
    fixture.expect("top/work", 1);
}

#[test]
fn a_clone_may_replace_the_directory_that_its_links_lie_in() {
    let mut fixture = Fixture::new();
    // A clone root, which has the bodies.
    fixture.clone_to("top", "", "fork");
    fixture.clone_to("fork/work", "", "fork");
    fixture.expect("fork", 1);
    fixture.reopen();
    fixture.expect("fork", 1);
}
