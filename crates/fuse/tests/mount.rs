//! A volume in memory, really mounted: tests of the kernel's caches and locks.
//!
//! Needs `/dev/fuse`, and root or fusermount3.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ramet_block::{Device, MemDevice};
use ramet_fs::control::{
    CLONE, CLONE_NO_REPLACE, CLONE_REPLACE, CloneRequest, NameRequest, REMOVE, SOURCE, SourceReply,
    decode_source_reply,
};
use ramet_fs::{FormatOptions, Kind, NewInode, ROOT_INO, Volume};
use ramet_fuse::{MountOptions, Mounted, Transport, mount};
use ramet_sys::control_ioctl;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Runs a program as nobody.
fn as_nobody(args: &[&str], dir: &Path) -> std::process::Output {
    std::process::Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .args(args)
        .current_dir(dir)
        .output()
        .unwrap()
}

/// Does `work` as nobody, on a thread of its own.
fn as_nobody_here<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    as_nobody_in(&[], work)
}

/// Does `work` as nobody, with these supplementary groups.
fn as_nobody_in<T: Send>(groups: &[u32], work: impl FnOnce() -> T + Send) -> T {
    let become_nobody = || {
        use rustix::process::{Gid, Uid};
        let groups: Vec<_> = groups.iter().map(|group| Gid::from_raw(*group)).collect();
        rustix::thread::set_thread_groups(&groups)?;
        rustix::thread::set_thread_gid(Gid::from_raw(65534))?;
        rustix::thread::set_thread_uid(Uid::from_raw(65534))
    };
    std::thread::scope(|threads| {
        let thread = threads.spawn(|| {
            become_nobody().unwrap();
            work()
        });
        thread.join().unwrap()
    })
}

struct Mount {
    mounted: Option<Mounted>,
    volume: Arc<Volume>,
    dir: tempfile::TempDir,
}

impl Mount {
    fn new() -> Self {
        Self::through(Transport::Any)
    }

    fn through(transport: Transport) -> Self {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(1 << 30));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, ramet_fs::OpenOptions::default()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let options = MountOptions {
            transport,
            ..MountOptions::new("test")
        };
        let mounted = mount(Arc::clone(&volume), dir.path(), &options).unwrap();
        Self {
            mounted: Some(mounted),
            volume,
            dir,
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Unmounts and checks the volume.
    fn finish(mut self) {
        let mounted = self.mounted.take().unwrap();
        common::unmount(mounted);
        let findings = self.volume.controls().check().unwrap();
        assert!(findings.is_empty(), "{findings:#?}");
        self.volume.close().unwrap();
    }
}

fn parent_and_name(path: &Path) -> io::Result<(File, Vec<u8>)> {
    let name = path
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .as_bytes()
        .to_vec();
    Ok((File::open(path.parent().unwrap())?, name))
}

fn source_of(path: &Path) -> io::Result<SourceReply> {
    let (dir, name) = parent_and_name(path)?;
    let mut bytes = NameRequest { name }.encode().unwrap();
    control_ioctl(dir, SOURCE, &mut bytes)?;
    Ok(decode_source_reply(&bytes).unwrap())
}

fn clone(from: &Path, to: &Path, flags: u32) -> io::Result<()> {
    let source = source_of(from)?.token;
    let (dir, name) = parent_and_name(to)?;
    let request = CloneRequest {
        flags,
        source,
        name,
    };
    control_ioctl(dir, CLONE, &mut request.encode().unwrap())
}

fn remove(path: &Path) -> io::Result<()> {
    let (dir, name) = parent_and_name(path)?;
    control_ioctl(dir, REMOVE, &mut NameRequest { name }.encode().unwrap())
}

#[test]
fn a_source_is_named_in_its_directory_and_once() {
    let mount = Mount::new();
    let file = mount.path("file");
    fs::write(&file, "x").unwrap();
    let dir = File::open(mount.dir.path()).unwrap();
    let clone_of = |source| {
        let name = b"copy".to_vec();
        let request = CloneRequest {
            flags: 0,
            source,
            name,
        };
        control_ioctl(&dir, CLONE, &mut request.encode().unwrap())
    };
    let stale = Some(rustix::io::Errno::STALE.raw_os_error());
    let number = fs::metadata(&file).unwrap().ino();
    assert_eq!(clone_of(number).unwrap_err().raw_os_error(), stale);
    let reply = source_of(&file).unwrap();
    assert_eq!(reply.ino, number);
    clone_of(reply.token).unwrap();
    assert_eq!(clone_of(reply.token).unwrap_err().raw_os_error(), stale);
    let missing = source_of(&mount.path("missing")).unwrap_err();
    assert_eq!(missing.kind(), io::ErrorKind::NotFound);
}

#[test]
fn clone_is_seen_at_once_over_cached_entries() {
    let mount = Mount::new();
    let (src, dst) = (mount.path("src"), mount.path("dst"));
    fs::create_dir_all(src.join("a/b")).unwrap();
    fs::write(src.join("a/b/file"), "one").unwrap();
    fs::hard_link(src.join("a/b/file"), src.join("link")).unwrap();
    assert!(!dst.exists(), "the kernel remembers that");
    let links = fs::metadata(mount.dir.path()).unwrap().nlink();

    clone(&src, &dst, 0).unwrap();
    assert_eq!(fs::metadata(mount.dir.path()).unwrap().nlink(), links + 1);
    assert_eq!(fs::read_to_string(dst.join("a/b/file")).unwrap(), "one");
    assert_eq!(
        fs::metadata(dst.join("link")).unwrap().ino(),
        fs::metadata(dst.join("a/b/file")).unwrap().ino()
    );
    fs::write(dst.join("link"), "two").unwrap();
    assert_eq!(fs::read_to_string(dst.join("a/b/file")).unwrap(), "two");
    assert_eq!(fs::read_to_string(src.join("a/b/file")).unwrap(), "one");

    // The kernel caches all of these, and then the clone replaces them.
    let mut open = File::open(dst.join("a/b/file")).unwrap();
    let stale_dir = File::open(dst.join("a")).unwrap();
    clone(&src, &dst, CLONE_REPLACE).unwrap();
    assert_eq!(fs::read_to_string(dst.join("a/b/file")).unwrap(), "one");
    assert_eq!(fs::read_to_string(dst.join("link")).unwrap(), "one");
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    assert_eq!(text, "two", "an open file survives its tree");
    assert!(stale_dir.metadata().is_ok());
    let error = clone(&src, &dst, CLONE_NO_REPLACE).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);

    remove(&dst).unwrap();
    assert!(!dst.exists());
    assert_eq!(fs::metadata(mount.dir.path()).unwrap().nlink(), links);
    drop((open, stale_dir));
    mount.finish();
}

#[test]
fn a_clone_over_a_name_of_a_hard_link_updates_the_others() {
    let mount = Mount::new();
    for name in ["one", "two"] {
        fs::create_dir(mount.path(name)).unwrap();
    }
    fs::write(mount.path("one/file"), "x").unwrap();
    fs::hard_link(mount.path("one/file"), mount.path("two/file")).unwrap();
    fs::create_dir(mount.path("other")).unwrap();
    fs::write(mount.path("other/file"), "y").unwrap();
    assert_eq!(fs::metadata(mount.path("two/file")).unwrap().nlink(), 2);
    clone(&mount.path("other"), &mount.path("one"), CLONE_REPLACE).unwrap();
    assert_eq!(fs::read_to_string(mount.path("one/file")).unwrap(), "y");
    assert_eq!(fs::metadata(mount.path("two/file")).unwrap().nlink(), 1);
    mount.finish();
}

#[test]
fn a_clone_onto_a_link_of_its_source_is_seen_as_a_file_of_its_own() {
    let mount = Mount::new();
    let (a, b) = (mount.path("a"), mount.path("b"));
    fs::write(&a, "one").unwrap();
    fs::hard_link(&a, &b).unwrap();
    let mut open = File::open(&b).unwrap();
    clone(&a, &b, CLONE_REPLACE).unwrap();
    fs::write(&b, "two").unwrap();
    assert_eq!(fs::read_to_string(&a).unwrap(), "one");
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    assert_eq!(text, "one", "an open file is the one that was opened");
    for path in [&a, &b] {
        assert_eq!(fs::metadata(path).unwrap().nlink(), 1);
    }
    let refused = clone(&a, &a, CLONE_REPLACE).unwrap_err();
    assert_eq!(
        refused.raw_os_error(),
        Some(rustix::io::Errno::INVAL.raw_os_error())
    );
    drop(open);
    mount.finish();
}

#[test]
fn a_file_is_opened_by_its_handle_and_no_more_when_it_is_removed() {
    const SCRIPT: &str = "import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
handle = (ctypes.c_uint32 * 34)(128)
mount = ctypes.c_int()
path = os.fsencode(sys.argv[1])
assert libc.name_to_handle_at(-100, path, handle, ctypes.byref(mount), 0) == 0
top = os.open(os.path.dirname(sys.argv[1]), os.O_RDONLY)
opened = libc.open_by_handle_at(top, handle, os.O_RDONLY)
print(os.read(opened, 9).decode(), end=' ')
os.close(opened)
os.unlink(path)
open(path, 'w').close()
print(libc.open_by_handle_at(top, handle, os.O_RDONLY), ctypes.get_errno())";
    let mount = Mount::new();
    let path = mount.path("file");
    fs::write(&path, "contents").unwrap();
    let mut python = std::process::Command::new("python3");
    let out = python.args(["-c", SCRIPT]).arg(&path).output().unwrap();
    let stale = format!("contents -1 {}\n", rustix::io::Errno::STALE.raw_os_error());
    assert_eq!(String::from_utf8_lossy(&out.stdout), stale, "{out:?}");
    mount.finish();
}

#[test]
fn a_file_that_is_being_written_is_read_as_it_is() {
    let mount = Mount::new();
    let path = mount.path("new");
    let mut file = File::create_new(&path).unwrap();
    for text in ["a\n", "a\nb\n"] {
        file.write_all(&text.as_bytes()[text.len() - 2..]).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }
    drop(file);
    mount.finish();
}

/// Edits of one file, through descriptors with and without direct I/O. Each edit is followed by a
/// comparison with a copy in memory.
#[test]
fn random_edits_of_a_file_read_back() {
    let seed = std::env::var("RAMET_SEED")
        .map_or_else(|_| rand::rng().random(), |seed| seed.parse().unwrap());
    println!("RAMET_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mount = Mount::new();
    let path = mount.path("file");
    // The descriptor that created the file goes past the kernel's pages, and the other one does
    // not.
    let past = File::create_new(&path).unwrap();
    let mut options = OpenOptions::new();
    let mut file = options.read(true).write(true).open(&path).unwrap();
    let mut want: Vec<u8> = Vec::new();
    let size_max = 300_000usize;
    for step in 0..6000 {
        let (at, len) = (
            random.random_range(0..size_max),
            random.random_range(1..70_000),
        );
        let len = len.min(size_max - at).max(1);
        let (from, to) = (at as u64, (at + len) as u64);
        match random.random_range(0..8) {
            0 | 1 => {
                let byte = random.random::<u8>();
                let data: Vec<u8> = (0..len)
                    .map(|at| byte.wrapping_add((at / 7) as u8))
                    .collect();
                let through = if random.random() { &past } else { &file };
                through.write_all_at(&data, from).unwrap();
                want.resize(want.len().max(at + len), 0);
                want[at..at + len].copy_from_slice(&data);
            }
            2 => {
                file.set_len(from).unwrap();
                want.resize(at, 0);
            }
            3 => {
                use rustix::fs::FallocateFlags;
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                rustix::fs::fallocate(&file, flags, from, to - from).unwrap();
                let end = (at + len).min(want.len());
                want[at.min(end)..end].fill(0);
            }
            4 => {
                rustix::fs::fallocate(
                    &file,
                    rustix::fs::FallocateFlags::ZERO_RANGE,
                    from,
                    to - from,
                )
                .unwrap();
                want.resize(want.len().max(at + len), 0);
                want[at..at + len].fill(0);
            }
            5 => {
                let copy = mount.path("copy");
                fs::copy(&path, &copy).unwrap();
                assert!(fs::read(&copy).unwrap() == want, "copy, step {step}");
            }
            6 => {
                file = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .open(&path)
                    .unwrap()
            }
            _ => {
                // This reads the file without the kernel's cached pages.
                rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
                let mut text = Vec::new();
                file.rewind().unwrap();
                file.read_to_end(&mut text).unwrap();
                assert!(text == want, "step {step}");
            }
        }
        let end = (at + len).min(want.len());
        let mut part = vec![0; end.saturating_sub(at)];
        file.read_exact_at(&mut part, from).unwrap();
        assert!(
            part == want[at.min(end)..end],
            "range {at}..{end}, step {step}"
        );
        assert_eq!(
            file.metadata().unwrap().len(),
            want.len() as u64,
            "step {step}"
        );
    }
    drop(file);
    drop(past);
    mount.finish();
}

/// Requests of one kind since the volume was mounted.
fn requests_of(dir: &Path, operation: &str) -> u64 {
    common::counter(dir, "requests", operation)
}

/// Number of requests of one kind during `work`.
fn requests_during(dir: &Path, operation: &str, work: impl FnOnce()) -> u64 {
    let before = requests_of(dir, operation);
    work();
    requests_of(dir, operation) - before
}

#[test]
fn files_are_opened_and_closed_without_a_request_and_read_as_they_are() {
    const FILES: u32 = 300;
    let mount = Mount::new();
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let mut random = |len| -> Vec<u8> { (0..len).map(|_| rng.random()).collect() };
    let path = mount.path("quiet");
    let contents = random(10_000);
    fs::write(&path, &contents).unwrap();
    for _ in 0..3 {
        assert!(fs::read(&path).unwrap() == contents);
    }
    let requests = ["OPEN", "READ", "FLUSH", "RELEASE"];
    let requests = requests.map(|operation| requests_of(mount.dir.path(), operation));
    // These are the mount's own first requests. The transport decides whether the kernel sends
    // FLUSH.
    assert_eq!((requests[0], requests[1], requests[3]), (1, 1, 0));
    assert!(requests[2] <= 1);
    // Each file is written anew while other threads open it for the first time.
    let newest = AtomicU32::new(0);
    std::thread::scope(|threads| {
        for _ in 0..3 {
            threads.spawn(|| {
                let mut last = 0;
                while last < FILES {
                    let now = newest.load(Ordering::SeqCst);
                    if now > last {
                        fs::read(mount.path(&format!("f{now}"))).unwrap();
                        last = now;
                    }
                }
            });
        }
        for number in 1..=FILES {
            let path = mount.path(&format!("f{number}"));
            fs::write(&path, random(1 + 37 * number as usize % 9_000)).unwrap();
            newest.store(number, Ordering::SeqCst);
            let now = random(1 + 53 * number as usize % 9_000);
            fs::write(&path, &now).unwrap();
            assert!(fs::read(&path).unwrap() == now, "file {number}");
            let (early, late) = (random(3_000), random(500));
            let file = OpenOptions::new().write(true).open(&path).unwrap();
            file.write_all_at(&early, 0).unwrap();
            file.set_len(2_500).unwrap();
            file.write_all_at(&late, 2_600).unwrap();
            drop(file);
            let expected = [&early[..2_500], &[0; 100], &late].concat();
            assert!(fs::read(&path).unwrap() == expected, "file {number}");
        }
    });
    mount.finish();
}

#[test]
fn attributes_come_with_a_listing_to_threads_that_use_them() {
    const FILES: u32 = 40;
    const DIRS: u32 = 100;
    let mount = Mount::new();
    let root = mount.dir.path();
    let create = |dir, name: &str, kind| {
        let new = NewInode::new(kind, 0o755);
        // The kernel does not know this inode.
        let created = mount
            .volume
            .names()
            .create(dir, name.as_bytes(), &new)
            .unwrap();
        created.ino
    };
    for number in 0..DIRS {
        let dir = create(ROOT_INO, &format!("d{number}"), Kind::Directory);
        create(dir, "sub", Kind::Directory);
        for file in 0..FILES {
            create(dir, &format!("f{file}"), Kind::Regular);
        }
    }
    let list = |dir: &Path| fs::read_dir(dir).unwrap().count();
    let lookups_of = |work: &dyn Fn()| requests_during(root, "LOOKUP", work);
    let dir = |number: u32| root.join(format!("d{number}"));
    assert_eq!(list(root), DIRS as usize);
    let look_at_files = |number: u32, files: u32| {
        for file in 0..files {
            fs::metadata(dir(number).join(format!("f{file}"))).unwrap();
        }
    };
    let short = lookups_of(&|| {
        list(&dir(0));
        look_at_files(0, FILES);
    });
    assert_eq!(short, 0, "a short program misses none");
    for number in 1..20 {
        assert_eq!(list(&dir(number)), 1 + FILES as usize);
    }
    let of_directory = lookups_of(&|| {
        list(&dir(20));
        fs::metadata(dir(20).join("sub")).unwrap();
    });
    assert_eq!(of_directory, 0);
    // The listings stay without attributes, and are few.
    let missed = lookups_of(&|| look_at_files(20, 1));
    assert_eq!(missed, 1);
    let used = lookups_of(&|| {
        list(&dir(21));
        look_at_files(21, FILES);
    });
    assert_eq!(used, 0);
    // Another thread leaves many listings without attributes, and a third one wants those.
    std::thread::scope(|threads| {
        threads.spawn(|| assert!((22..DIRS).all(|number| list(&dir(number)) > 0)));
    });
    let missed = lookups_of(&|| look_at_files(DIRS - 1, 1));
    assert_eq!(missed, 1);
    // The kernel drops them a moment later.
    let began = Instant::now();
    let listed = || requests_during(root, "READDIRPLUS", || assert!(list(&dir(DIRS - 2)) > 0));
    while listed() == 0 {
        assert!(began.elapsed() < Duration::from_secs(20));
    }
    let used = lookups_of(&|| look_at_files(DIRS - 2, FILES));
    assert_eq!(used, 0, "the thread uses them");
    mount.finish();
}

/// A thread that only looks into directories gets short answers, and every listing is whole.
#[test]
fn directory_that_was_looked_into_is_listed_whole() {
    const DIRS: u32 = 12;
    const FILES: u32 = 20;
    let mount = Mount::new();
    let root = mount.dir.path();
    let dir = |number: u32| root.join(format!("d{number}"));
    // Directories have between 0 and `FILES` files.
    let files = |number: u32| {
        if number.is_multiple_of(3) {
            number / 3
        } else {
            FILES
        }
    };
    for number in 0..DIRS {
        fs::create_dir(dir(number)).unwrap();
        for file in 0..files(number) {
            fs::write(dir(number).join(format!("f{file:02}")), "").unwrap();
        }
    }
    let names = |number: u32| -> Vec<String> {
        let entries = fs::read_dir(dir(number)).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    };
    let expected = |number: u32| -> Vec<String> {
        (0..files(number))
            .map(|file| format!("f{file:02}"))
            .collect()
    };
    let looks_into = |number: u32| {
        let first = fs::read_dir(dir(number)).unwrap().next();
        assert_eq!(first.is_some(), files(number) > 0);
    };
    let answers_of = |work: &dyn Fn()| requests_during(root, "READDIRPLUS", work);
    for number in 0..DIRS - 2 {
        looks_into(number);
        assert_eq!(names(number), expected(number), "d{number}");
    }
    // The thread did not look into this directory first: the listing takes an answer more, and the
    // next one does not.
    for (number, more) in [(DIRS - 2, 1), (DIRS - 1, 0)] {
        let answers = answers_of(&|| assert_eq!(names(number), expected(number)));
        assert_eq!(answers, 2 + more, "d{number}");
        let again = answers_of(&|| assert_eq!(names(number), expected(number)));
        assert_eq!(again, 0, "the kernel keeps d{number}");
    }
    mount.finish();
}

/// Sets its flag when it is dropped, also by a panic.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn clones_and_removals_are_seen_at_once_by_threads_that_looked_before() {
    const NAMES: u32 = 5;
    const ROUNDS: u32 = 400;
    let mount = Mount::new();
    let root = mount.dir.path();
    let contents = |source: u32| format!("source {source}");
    for source in 0..2 {
        fs::create_dir(root.join(format!("s{source}"))).unwrap();
        fs::write(root.join(format!("s{source}/file")), contents(source)).unwrap();
    }
    let is_done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        for looker in 0..2 {
            let is_done = &is_done;
            threads.spawn(move || {
                let mut number = looker;
                while !is_done.load(Ordering::SeqCst) {
                    // The name may exist, be missing, or be on its way out.
                    let _ = fs::metadata(root.join(format!("c{}", number % NAMES)));
                    let _ = fs::read(root.join(format!("c{}/file", number % NAMES)));
                    number += 1;
                }
            });
        }
        let _done = Done(&is_done);
        for round in 0..ROUNDS {
            let copy = root.join(format!("c{}", round % NAMES));
            // No thread has looked this name up before.
            let new = root.join(format!("n{round}"));
            let source = round / NAMES % 2;
            clone(&root.join(format!("s{source}")), &copy, CLONE_REPLACE).unwrap();
            clone(&copy, &new, CLONE_NO_REPLACE).unwrap();
            for name in [&copy, &new] {
                let found = fs::read_to_string(name.join("file"));
                assert_eq!(found.unwrap(), contents(source), "round {round}");
            }
            if round % 3 == 0 {
                for name in [&copy, &new] {
                    remove(name).unwrap();
                    let missing = fs::metadata(name).unwrap_err().kind();
                    assert_eq!(missing, io::ErrorKind::NotFound, "round {round}");
                }
            }
            if round % 9 == 0 {
                // The kernel knew the name as existing and then as missing.
                clone(&root.join("s0"), &new, CLONE_NO_REPLACE).unwrap();
                let found = fs::read_to_string(new.join("file"));
                assert_eq!(found.unwrap(), contents(0), "round {round}");
            }
        }
    });
    mount.finish();
}

#[test]
fn many_slow_requests_from_one_processor_leave_room_for_quick_ones() {
    let mount = Mount::new();
    let root = mount.dir.path();
    fs::create_dir(root.join("source")).unwrap();
    std::thread::scope(|threads| {
        for number in 0..16 {
            threads.spawn(move || {
                let mut first = rustix::thread::CpuSet::new();
                first.set(0);
                rustix::thread::sched_setaffinity(None, &first).unwrap();
                // An invalidation waits for a thread that changes this directory, and each clone
                // ends with one.
                for round in 0..20 {
                    let file = File::create(root.join(format!("f{number}"))).unwrap();
                    clone(&root.join("source"), &root.join("copy"), CLONE_REPLACE).unwrap();
                    file.sync_all().unwrap();
                    fs::rename(
                        root.join(format!("f{number}")),
                        root.join(format!("g{number}-{round}")),
                    )
                    .unwrap();
                }
            });
        }
    });
    assert_eq!(fs::read_dir(root).unwrap().count(), 2 + 16 * 20);
    mount.finish();
}

#[test]
fn threads_that_do_everything_at_once_neither_hang_nor_break_the_tree() {
    let mount = Mount::new();
    let root = mount.dir.path();
    for dir in 0..3 {
        fs::create_dir_all(root.join(format!("d{dir}/e"))).unwrap();
    }
    let stop = AtomicBool::new(false);
    let done = AtomicU32::new(0);
    let trees = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for thread in 0..6u64 {
            let (stop, done, trees) = (&stop, &done, &trees);
            scope.spawn(move || {
                let mut random = StdRng::seed_from_u64(thread);
                while !stop.load(Ordering::Relaxed) {
                    let mut pick = || {
                        let dir = random.random_range(0..3);
                        let deep = if random.random_bool(0.5) { "e/" } else { "" };
                        root.join(format!("d{dir}/{deep}f{}", random.random_range(0..4)))
                    };
                    let (one, two) = (pick(), pick());
                    // Most operations fail, because the names come and go.
                    let result: io::Result<()> = match random.random_range(0..14) {
                        0..3 => fs::write(&one, vec![7; random.random_range(0..60_000)]),
                        3 => fs::read(&one).map(|_| ()),
                        4 => fs::remove_file(&one),
                        5 => fs::rename(&one, &two),
                        6 => fs::hard_link(&one, &two),
                        7 => fs::create_dir(&one),
                        8 => fs::remove_dir(&one),
                        9 => fs::read_dir(one.parent().unwrap()).map(|dir| dir.for_each(drop)),
                        10 => fs::rename(one.parent().unwrap(), two.parent().unwrap()),
                        // Each clone of a directory may double the number of entries that a walk
                        // visits.
                        11 if trees.fetch_add(1, Ordering::Relaxed) < 10 => {
                            clone(one.parent().unwrap(), &two, CLONE_REPLACE)
                        }
                        11 if one.is_file() => clone(&one, &two, CLONE_REPLACE),
                        12 => File::open(&one).and_then(|file| file.sync_all()),
                        _ if random.random_bool(0.1) => remove(&one),
                        _ => fs::metadata(&one).map(|_| ()),
                    };
                    let errno = result.err().and_then(|error| error.raw_os_error());
                    assert_ne!(errno, Some(rustix::io::Errno::IO.raw_os_error()));
                    for dir in 0..3 {
                        let _ = fs::create_dir_all(root.join(format!("d{dir}/e")));
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let _done = Done(&stop);
        let start = Instant::now();
        let mut before = 0;
        while start.elapsed() < Duration::from_secs(8) {
            std::thread::sleep(Duration::from_secs(2));
            let now = done.load(Ordering::Relaxed);
            assert!(
                now > before,
                "nothing moves any more after {now} operations"
            );
            before = now;
        }
    });
    println!("{} operations", done.load(Ordering::Relaxed));
    mount.finish();
}

#[test]
fn a_write_by_another_user_clears_setuid_also_in_the_kernel() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let mount = Mount::new();
    let path = mount.path("program");
    fs::write(&path, "x").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
    fs::set_permissions(mount.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let script = format!("printf y >> {}", path.display());
    let output = as_nobody(&["sh", "-c", &script], mount.dir.path());
    assert!(output.status.success(), "{output:?}");
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o777);
    let mut file = OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(b"z").unwrap();
    drop(file);
    assert_eq!(fs::read_to_string(&path).unwrap(), "xyz");
    mount.finish();
}

#[test]
fn privileges_that_a_change_takes_away_are_gone_in_the_kernel_before_it_is_answered() {
    use rustix::fs::{AtFlags, CWD, FallocateFlags, StatxFlags, copy_file_range, fallocate, statx};
    const SOURCE_BYTES: usize = 100_000;
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let copy = |source: &File, file: &File, len: usize| {
        copy_file_range(source, Some(&mut 0), file, Some(&mut 0), len).map(drop)
    };
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    type Step<'a> = &'a (dyn Fn(&File, &File) -> rustix::io::Result<()> + Sync);
    let changes: [(&str, Step<'_>); 7] = [
        ("write", &|_, file| {
            rustix::io::pwrite(file, b"x", 0).map(drop)
        }),
        ("extend", &|_, file| {
            fallocate(file, FallocateFlags::empty(), 0, 5000)
        }),
        ("allocate", &|_, file| {
            fallocate(file, FallocateFlags::KEEP_SIZE, 0, 5000)
        }),
        ("zero", &|_, file| {
            fallocate(file, FallocateFlags::ZERO_RANGE, 0, 5000)
        }),
        ("punch", &|_, file| fallocate(file, punch, 0, 5)),
        ("copy", &|source, file| copy(source, file, 100)),
        ("clone", &|source, file| copy(source, file, SOURCE_BYTES)),
    ];
    for transport in [Transport::Device, Transport::Any] {
        let mount = Mount::through(transport);
        fs::set_permissions(mount.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let (source, path) = (mount.path("source"), mount.path("program"));
        fs::write(&source, vec![7; SOURCE_BYTES]).unwrap();
        for (what, change) in changes.iter().cycle().take(10 * changes.len()) {
            fs::write(&path, "program").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
            let mode = as_nobody_here(|| {
                let source = File::open(&source)?;
                let file = OpenOptions::new().write(true).open(&path)?;
                change(&source, &file)?;
                // The kernel asks only if the mode itself is out of date.
                let seen = statx(CWD, &path, AtFlags::empty(), StatxFlags::MODE)?;
                io::Result::Ok(seen.stx_mode & 0o7777)
            });
            assert_eq!(mode.unwrap(), 0o777, "{what} through {transport:?}");
        }
        mount.finish();
    }
}

/// Root of a user namespace that any user may make has no capability outside of it.
#[test]
fn root_of_another_user_namespace_keeps_no_setuid() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let made = ["unshare", "--map-root-user"];
    if !as_nobody(&[&made[..], &["true"]].concat(), Path::new("/"))
        .status
        .success()
    {
        println!("no user namespaces here");
        return;
    }
    let changes = [
        "os.pwrite(file, b'x', 0)",
        "os.ftruncate(file, 1)",
        "os.ftruncate(file, 20)",
        "os.truncate('program', 1)",
        "os.open('program', os.O_WRONLY | os.O_TRUNC)",
        "os.posix_fallocate(file, 0, 9000)",
        "os.copy_file_range(os.open('source', os.O_RDONLY), file, 100)",
        "os.copy_file_range(os.open('source', os.O_RDONLY), file, 100000)",
    ];
    for transport in [Transport::Device, Transport::Any] {
        let mount = Mount::through(transport);
        fs::set_permissions(mount.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let path = mount.path("program");
        fs::write(mount.path("source"), vec![7; 100_000]).unwrap();
        for change in changes {
            fs::write(&path, "program").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
            let script = format!("import os; file = os.open('program', os.O_RDWR); {change}");
            let args = [&made[..], &["python3", "-c", &script]].concat();
            let output = as_nobody(&args, mount.dir.path());
            assert!(output.status.success(), "{output:?}");
            let mode = fs::metadata(&path).unwrap().mode() & 0o7777;
            assert_eq!(mode, 0o777, "{change} through {transport:?}");
        }
        mount.finish();
    }
}

#[test]
fn setgid_without_group_execution_survives_a_change_by_a_member_of_the_group_only() {
    use rustix::fs::{FallocateFlags, copy_file_range, fallocate};
    if !rustix::process::geteuid().is_root() {
        return;
    }
    type Step<'a> = &'a (dyn Fn(&File, &Path) -> io::Result<()> + Sync);
    let changes: [(&str, Step<'_>); 5] = [
        ("write", &|file, _| {
            Ok(rustix::io::pwrite(file, b"x", 0).map(drop)?)
        }),
        ("ftruncate", &|file, _| file.set_len(10)),
        ("O_TRUNC", &|_, path| File::create(path).map(drop)),
        ("fallocate", &|file, _| {
            Ok(fallocate(file, FallocateFlags::empty(), 0, 8192)?)
        }),
        ("copy", &|file, path| {
            let source = File::open(path)?;
            Ok(copy_file_range(&source, Some(&mut 0), file, Some(&mut 5000), 100).map(drop)?)
        }),
    ];
    const GROUP: u32 = 4321;
    for transport in [Transport::Device, Transport::Any] {
        let mount = Mount::through(transport);
        fs::set_permissions(mount.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let path = mount.path("program");
        for (what, change) in changes {
            // Mode before the change, after a change by a stranger, and after one by a member of
            // the group.
            for (before, stranger, member) in [
                (0o6666, 0o666, 0o2666),
                (0o2666, 0o666, 0o2666),
                (0o6676, 0o676, 0o676),
            ] {
                for (groups, after) in [(&[][..], stranger), (&[GROUP][..], member)] {
                    fs::write(&path, vec![7; 9000]).unwrap();
                    std::os::unix::fs::chown(&path, Some(1234), Some(GROUP)).unwrap();
                    fs::set_permissions(&path, fs::Permissions::from_mode(before)).unwrap();
                    as_nobody_in(groups, || {
                        let mut open = OpenOptions::new();
                        change(&open.read(true).write(true).open(&path)?, &path)
                    })
                    .unwrap();
                    let mode = fs::metadata(&path).unwrap().mode() & 0o7777;
                    assert_eq!(mode, after, "{what} of {before:o} through {transport:?}");
                }
            }
        }
        mount.finish();
    }
}

/// A clone has this state for a moment: the file exists, and the kernel believes that the name does
/// not.
#[test]
fn opening_to_create_gives_no_access_to_a_file_the_kernel_did_not_know_of() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let mount = Mount::new();
    let root = mount.dir.path();
    fs::set_permissions(root, fs::Permissions::from_mode(0o1777)).unwrap();
    assert!(!mount.path("secret").exists(), "and the kernel remembers");
    let new = ramet_fs::NewInode::new(ramet_fs::Kind::Regular, 0o600);
    let made = mount
        .volume
        .names()
        .create(ramet_fs::ROOT_INO, b"secret", &new);
    let ino = made.unwrap().ino;
    mount.volume.files().write(ino, 0, b"secret", None).unwrap();
    mount.volume.forget(ino, 1);
    for script in ["exec 3<>secret; cat <&3", "printf x > secret"] {
        let output = as_nobody(&["sh", "-c", script], root);
        assert!(!output.status.success(), "{script}: {output:?}");
    }
    assert_eq!(fs::read_to_string(mount.path("secret")).unwrap(), "secret");
    mount.finish();
}
