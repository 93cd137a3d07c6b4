//! Volumes that the fuzzer starts from, the same in every run.

use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ramet_betree::{Error, FormatOptions, OpenOptions, Tree};
use ramet_block::{Codec, Device, ZstdLevel};
use ramet_fs::{Caller, Clock, CloneMode, Kind, NewInode, ROOT_INO, SetXattr, Time, Volume};
use ramet_sim::{Generator, Mix, Model, Setup, SparseDevice, apply};

use crate::visit::{visit_tree, visit_volume};

/// A valid volume.
pub struct Base {
    image: SparseDevice,
    /// How its tree is opened.
    pub open: OpenOptions,
    /// Whether a file system is in it.
    pub has_files: bool,
    /// Everything that is read when it is used: address and length.
    pub places: Vec<(u64, usize)>,
}

impl Base {
    fn new(image: SparseDevice, open: OpenOptions, has_files: bool) -> Base {
        let mut base = Base {
            image,
            open,
            has_files,
            places: Vec::new(),
        };
        let watched = Arc::new(Watched {
            device: base.device(),
            reads: Mutex::default(),
        });
        if has_files {
            visit_volume(watched.clone());
        } else {
            visit_tree(watched.clone(), &base.open);
        }
        let mut reads = watched.reads.lock().unwrap_or_else(PoisonError::into_inner);
        reads.sort_unstable();
        reads.dedup();
        base.places = std::mem::take(&mut reads);
        drop(reads);
        base
    }

    /// A device that holds it.
    pub fn device(&self) -> SparseDevice {
        self.image.image()
    }
}

/// Number `n` of the volumes, modulo how many there are.
pub fn base(n: usize) -> &'static Base {
    let bases = bases();
    &bases[n % bases.len()]
}

fn bases() -> &'static [Base] {
    static BASES: OnceLock<Vec<Base>> = OnceLock::new();
    BASES.get_or_init(|| {
        let mut bases = vec![
            tree(2, 90, Codec::Raw),
            tree(3, 90, Codec::Lz4),
            files(true),
            files(false),
        ];
        let zstd = ZstdLevel::new(1).expect("a level of zstd");
        bases.push(tree(5, 250, Codec::Zstd(zstd)));
        bases
    })
}

/// A tree of tiny nodes after a random history; that of an odd seed has a journal.
fn tree(seed: u64, batches: usize, codec: Codec) -> Base {
    let mut setup = Setup {
        device_bytes: 4 << 20,
        ..Setup::tiny_nodes()
    };
    setup.open.manual = true;
    // What a history of small batches makes in megabytes otherwise.
    setup.open.cache_bytes = Some(1 << 20);
    let shape = setup.open.shape.as_mut().expect("tiny nodes have a shape");
    shape.codec = codec;
    let device = Arc::new(SparseDevice::new(setup.device_bytes));
    let format = FormatOptions {
        codec: Some(codec),
        ..setup.format
    };
    Tree::format(&as_device(&device), &format).expect("the device is large enough");
    let tree = Tree::open(as_device(&device), setup.open.clone()).expect("it was just made");
    let mut generator = Generator::new(seed, 120, Mix::Dense);
    let mut model = Model::default();
    for batch in 0..batches {
        let changes = generator.changes(&model);
        match apply(&tree, &changes) {
            Ok(()) => model.apply(&changes),
            Err(Error::NoSpace) => {}
            Err(error) => panic!("batch {batch}: {error}"),
        }
        if batch % 30 == 29 && batch + 20 < batches {
            tree.checkpoint().expect("there is room");
        }
    }
    if seed.is_multiple_of(2) {
        tree.close().expect("there is room");
    } else {
        tree.sync().expect("memory does not fail");
    }
    Base::new(device.image(), setup.open, false)
}

/// A file system with one of everything; one that was not `closed` has a journal.
fn files(closed: bool) -> Base {
    let device = Arc::new(SparseDevice::new(8 << 20));
    let format = ramet_fs::FormatOptions {
        compression: Some(Codec::Raw),
        ..ramet_fs::FormatOptions::default()
    };
    Volume::format(&as_device(&device), &format).expect("the device is large enough");
    let volume = open_files(as_device(&device)).expect("it was just made");
    let make = |dir, name: &[u8], kind, target: &[u8]| {
        let new = NewInode {
            target,
            ..NewInode::new(kind, 0o755)
        };
        volume
            .names()
            .create(dir, name, &new)
            .expect("a new name")
            .ino
    };
    let dir = make(ROOT_INO, b"dir", Kind::Directory, b"");
    for name in [&b"one"[..], b"two", b"three"] {
        let file = make(dir, name, Kind::Regular, b"");
        let bytes = name.repeat(3000);
        volume
            .files()
            .write(file, 0, &bytes, None)
            .expect("there is room");
        let attribute = volume
            .attributes()
            .setxattr(file, b"user.name", name, SetXattr::Any);
        attribute.expect("there is room");
    }
    make(dir, b"link", Kind::Symlink, b"one");
    let file = volume.names().lookup(dir, b"two").expect("just made").ino;
    volume.names().link(file, dir, b"hard").expect("a new name");
    volume
        .files()
        .write(file, 5 << 20, b"far", None)
        .expect("there is room");
    volume.checkpoint().expect("there is room");
    for copy in [&b"copy"[..], b"again"] {
        let cloned =
            volume
                .trees()
                .clone_entry(&Caller::root(), dir, ROOT_INO, copy, CloneMode::Replace);
        cloned.expect("a new name");
    }
    volume
        .files()
        .write(file, 9, b"changed", None)
        .expect("room");
    volume.names().unlink(dir, b"one").expect("it is there");
    if closed {
        volume.close().expect("there is room");
    } else {
        volume.sync_all().expect("memory does not fail");
    }
    Base::new(device.image(), OpenOptions::default(), true)
}

/// Opens a file system for a run that can be repeated.
pub fn open_files(device: Arc<dyn Device>) -> ramet_fs::Result<Arc<Volume>> {
    let options = ramet_fs::OpenOptions {
        cache_bytes: Some(1 << 20),
        clock: Some(Arc::new(Stopped)),
        ..ramet_fs::OpenOptions::default()
    };
    Volume::open(device, options)
}

fn as_device(device: &Arc<SparseDevice>) -> Arc<dyn Device> {
    device.clone()
}

/// A clock that does not go.
#[derive(Debug)]
struct Stopped;

impl Clock for Stopped {
    fn now(&self) -> Time {
        Time {
            secs: 1_700_000_000,
            nanos: 5,
        }
    }
}

/// A device that notes what is read.
struct Watched {
    device: SparseDevice,
    reads: Mutex<Vec<(u64, usize)>>,
}

impl Device for Watched {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut reads = self.reads.lock().unwrap_or_else(PoisonError::into_inner);
        reads.push((addr, buf.len()));
        self.device.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.device.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.device.discard(addr, len_bytes)
    }
}
