//! Prefetched files: the number of requests that they save, and that no reader sees wrong contents.
//!
//! Needs `/dev/fuse`, and root or fusermount3.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use ramet_block::{Device, MemDevice};
use ramet_fs::{Attr, FormatOptions, Ino, Kind, Time, Volume};
use ramet_fuse::protocol::abi::fopen;
use ramet_fuse::protocol::notification::Notification;
use ramet_fuse::protocol::{FileHandle, Header, Reply, Request};
use ramet_fuse::{MountOptions, Mounted, mount, serve};
use ramet_sys::Revocable;
use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};
use rustix::io::Errno;

/// An event that has not come after so long never comes.
const PATIENCE: Duration = Duration::from_secs(20);

/// A volume in memory that is opened and mounted again and again, so that the kernel knows none of
/// its files.
struct Bed {
    device: Arc<dyn Device>,
    dir: tempfile::TempDir,
    mounted: Option<(Mounted, Arc<Volume>)>,
}

impl Bed {
    fn new() -> Self {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(1 << 30));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        Self {
            device,
            dir: tempfile::tempdir().unwrap(),
            mounted: None,
        }
    }

    fn mount(&mut self, options: &str) {
        let device = Arc::clone(&self.device);
        let volume = Volume::open(device, ramet_fs::OpenOptions::default()).unwrap();
        let mut all = MountOptions::new("test");
        all.add(options).unwrap();
        let mounted = mount(Arc::clone(&volume), self.dir.path(), &all).unwrap();
        self.mounted = Some((mounted, volume));
    }

    fn unmount(&mut self) {
        let (mounted, volume) = self.mounted.take().unwrap();
        common::unmount(mounted);
        volume.close().unwrap();
    }

    fn count(&self, group: &str, counter: &str) -> u64 {
        common::counter(self.dir.path(), group, counter)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

fn contents(number: usize) -> Vec<u8> {
    let mut rng = StdRng::seed_from_u64(number as u64);
    let mut bytes = vec![0; 1 + number * 37 % 9_000];
    rng.fill_bytes(&mut bytes);
    bytes
}

/// Reads a whole tree as many programs do: a directory first, then its files in the order of the
/// directory. Answers the number of files.
fn read_all(dir: &Path, each: &mut dyn FnMut(&Path, Vec<u8>)) -> usize {
    let names = || fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let mut files = 0;
    for entry in names().collect::<Vec<_>>() {
        let path = entry.path();
        if entry.file_type().unwrap().is_dir() {
            files += read_all(&path, each);
        } else {
            let read = fs::read(&path).unwrap();
            each(&path, read);
            files += 1;
        }
    }
    files
}

fn number_of(path: &Path) -> usize {
    path.file_name().unwrap().to_str().unwrap().parse().unwrap()
}

#[test]
fn reads_of_all_files_in_order_need_few_requests() {
    const DIRS: usize = 30;
    const FILES: usize = 100;
    let mut bed = Bed::new();
    bed.mount("");
    for dir in 0..DIRS {
        let path = bed.path(&format!("{dir:03}"));
        fs::create_dir(&path).unwrap();
        for file in 0..FILES {
            let number = dir * FILES + file;
            fs::write(path.join(format!("{number:05}")), contents(number)).unwrap();
        }
    }
    for options in ["", "no_io_uring", "no_ahead"] {
        bed.unmount();
        bed.mount(options);
        let reads = bed.count("requests", "READ");
        let files = read_all(bed.dir.path(), &mut |path, read| {
            assert!(read == contents(number_of(path)), "{path:?}");
        });
        assert_eq!(files, DIRS * FILES);
        let reads = bed.count("requests", "READ") - reads;
        let sent = bed.count("prefetch", "sent_files");
        if options == "no_ahead" {
            assert_eq!((reads, sent), ((DIRS * FILES) as u64, 0));
        } else {
            // The scheduler decides how many readers are overtaken:
            // `docs/decisions/17-small-files-are-sent-ahead.md`.
            assert!(sent > (DIRS * FILES / 4) as u64, "`{options}`: {sent}");
            assert!(
                reads + sent < (DIRS * FILES * 3 / 2) as u64,
                "`{options}`: {reads} {sent}"
            );
        }
        // The kernel has all contents now, and gets no more.
        let again = read_all(bed.dir.path(), &mut |path, read| {
            assert!(read == contents(number_of(path)), "{path:?}");
        });
        assert_eq!(again, files);
    }
    bed.unmount();
}

#[test]
fn reads_out_of_order_send_no_files_ahead() {
    const FILES: usize = 1_000;
    let mut bed = Bed::new();
    bed.mount("");
    for number in 0..FILES {
        fs::write(bed.path(&format!("{number:05}")), contents(number)).unwrap();
    }
    bed.unmount();
    bed.mount("");
    assert_eq!(fs::read_dir(bed.dir.path()).unwrap().count(), FILES);
    // The reads go backwards, and then some way from one file to the next.
    for number in (0..FILES).rev().step_by(2).chain((0..FILES).step_by(20)) {
        let read = fs::read(bed.path(&format!("{number:05}"))).unwrap();
        assert!(read == contents(number), "{number}");
    }
    assert_eq!(bed.count("prefetch", "sent_files"), 0);
    bed.unmount();
}

/// A file system with one file, whose READ is answered when the test says so.
struct Stalling {
    has_read: Mutex<Sender<()>>,
    go: Mutex<Receiver<()>>,
}

const FILE: Ino = Ino(2);
const PAGE: usize = 4096;

fn attr(node: Ino) -> Attr {
    let kind = if node == FILE {
        Kind::Regular
    } else {
        Kind::Directory
    };
    Attr {
        ino: node,
        generation: 0,
        kind,
        perm: 0o755,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        size_bytes: PAGE as u64,
        sectors: 8,
        atime: Time::default(),
        mtime: Time::default(),
        ctime: Time::default(),
        btime: Time::default(),
    }
}

impl Stalling {
    fn answer(&self, header: &Header, request: Request<'_>) -> Reply {
        match request {
            Request::Lookup { name: b"file" } => Reply::entry(&attr(FILE)),
            Request::Lookup { .. } => Reply::error(Errno::NOENT),
            Request::Getattr { .. } => Reply::attr(&attr(header.node)),
            Request::Open { .. } => Reply::opened(FileHandle(0), fopen::KEEP_CACHE),
            Request::Read { room, .. } => {
                self.has_read.lock().send(()).unwrap();
                self.go.lock().recv_timeout(PATIENCE).unwrap();
                let len = room.len().min(PAGE);
                room[..len].fill(b'r');
                Reply::room(len)
            }
            _ => Reply::error(Errno::NOSYS),
        }
    }
}

/// Stores a page of `s` while a READ of the file, which will be answered with `r`, waits. With
/// `revokes`, the page is revoked before the READ is answered. Answers the result of the store, and
/// the contents of the file afterwards.
fn store_beside_a_read(revokes: bool) -> (std::io::Result<usize>, u8) {
    let dir = tempfile::tempdir().unwrap();
    let (has_read, reads) = channel();
    let (go, may_go) = channel();
    let stalling = Stalling {
        has_read: Mutex::new(has_read),
        go: Mutex::new(may_go),
    };
    let mut options = MountOptions::new("stalling");
    options.add("threads=2").unwrap();
    let mounted = serve(dir.path(), &options, |_| {
        Box::new(move |header, request, _| match request {
            Request::Forget { .. } | Request::BatchForget { .. } => None,
            request => Some(stalling.answer(header, request)),
        })
    });
    let mounted = mounted.unwrap();
    let path = dir.path().join("file");
    let mut bytes = Revocable::new(PAGE).unwrap();
    let fill = |room: &mut [u8]| {
        room.fill(b's');
        PAGE
    };
    bytes.fill(fill).unwrap();
    let result = std::thread::scope(|scope| {
        let reader = scope.spawn(|| fs::read(&path).unwrap());
        reads.recv_timeout(PATIENCE).unwrap();
        let (bytes, device) = (&bytes, mounted.device());
        let (thread, tid) = channel();
        let storing = scope.spawn(move || {
            thread.send(rustix::thread::gettid()).unwrap();
            bytes.write(device, Notification::store(FILE, 0, PAGE).as_bytes())
        });
        let tid = tid.recv().unwrap();
        let stat = format!("/proc/self/task/{}/stat", tid.as_raw_nonzero());
        let start = Instant::now();
        let waits = |stat: String| stat.rsplit_once(") ").unwrap().1.starts_with('D');
        while !waits(fs::read_to_string(&stat).unwrap()) {
            assert!(
                start.elapsed() < PATIENCE && !storing.is_finished(),
                "it waits for no page"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        if revokes {
            bytes.revoke().unwrap();
        }
        go.send(()).unwrap();
        let stored = storing.join().unwrap();
        let read = reader.join().unwrap();
        assert_eq!(read.len(), PAGE);
        let now = fs::read(&path).unwrap();
        assert!(
            now.iter().all(|byte| *byte == now[0]),
            "a page in two parts"
        );
        (stored, now[0])
    });
    common::unmount(mounted);
    result
}

/// The kernel's behaviour that prefetch depends on: a store waits for the page and then reads its
/// contents, so revoked contents do not reach the page.
#[test]
fn kernel_reads_the_contents_of_a_store_when_it_has_the_page() {
    let (stored, has) = store_beside_a_read(false);
    assert_eq!(
        (stored.unwrap(), has),
        (40 + PAGE, b's'),
        "the damage that revoking avoids"
    );
    let (stored, has) = store_beside_a_read(true);
    let error = Errno::from_io_error(&stored.unwrap_err());
    assert_eq!((error, has), (Some(Errno::FAULT), b'r'));
}

#[test]
fn file_that_was_sent_counts_as_read() {
    let mut bed = Bed::new();
    bed.mount("");
    for number in 0..100 {
        fs::write(bed.path(&format!("{number:05}")), contents(number)).unwrap();
    }
    let written = fs::metadata(bed.path("00050")).unwrap();
    // The access is to be later than the file.
    let latest = written.modified().unwrap().max(written.accessed().unwrap());
    while SystemTime::now() <= latest {
        std::thread::yield_now();
    }
    bed.unmount();
    bed.mount("");
    read_all(bed.dir.path(), &mut |_, _| {});
    assert!(bed.count("prefetch", "sent_files") > 0);
    let nanos = |of: &fs::Metadata| (of.atime(), of.atime_nsec());
    // The volume knows the access time; the kernel knows it when it asks.
    let ino = ramet_fs::Ino(written.ino());
    let (_, volume) = bed.mounted.as_ref().unwrap();
    let known = volume.attributes().getattr(ino).unwrap().atime;
    assert!((known.secs, i64::from(known.nanos)) > nanos(&written));
    bed.unmount();
}
