//! Listings, names and attributes that the kernel keeps: they save all requests, and are never
//! stale.
//!
//! `RAMET_ROUNDS` sets how many changes are made to directories whose listings are kept, and
//! `RAMET_SEED` which.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use ramet_e2e::control::clone_timed;
use ramet_e2e::{Bed, Mount, number, seeded};
use ramet_fs::control::{
    CLONE, CLONE_REPLACE, CloneRequest, NameRequest, REMOVE, SOURCE, decode_source_reply,
};
use ramet_sys::control_ioctl;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, RawDir, Timespec, Timestamps, openat, utimensat,
};
use rustix::process::{Pid, Signal, kill_process};

/// The time after which the kernel should have heard of a change.
const SOON: Duration = Duration::from_secs(20);

/// Requests by kind.
type Requests = BTreeMap<String, u64>;

fn requests(mount: &Mount) -> Requests {
    serde_json::from_value(mount.stat()["requests"].clone()).unwrap()
}

/// The requests of `work`, without those of the question itself.
fn requests_of(mount: &Mount, work: impl FnOnce()) -> Requests {
    // The first question may refresh attributes of the root, which the others then have.
    requests(mount);
    let before_question = requests(mount);
    let before = requests(mount);
    work();
    let after = requests(mount);
    let count = |at: &Requests, kind: &str| at.get(kind).copied().unwrap_or(0);
    let of_work = |kind: &String| {
        let all = count(&after, kind) - count(&before, kind);
        // The kernel forgets inodes at any time, also during a question.
        all.saturating_sub(count(&before, kind) - count(&before_question, kind))
    };
    let counted = after.keys().map(|kind| (kind.clone(), of_work(kind)));
    counted.filter(|(_, count)| *count > 0).collect()
}

fn shell(line: &str) {
    let quiet = Command::new("sh")
        .args(["-c", line])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    // `grep` that finds nothing says 1.
    assert!(
        quiet.unwrap().code().is_some_and(|code| code <= 1),
        "{line}"
    );
}

/// A tree of some directories, one of them large, files, links of both kinds, and a repository.
/// Answers the number of names.
fn plant(root: &Path) -> u64 {
    let mut names = 0;
    for dir in 0..12 {
        let dir = root.join(format!("d{dir}/below"));
        fs::create_dir_all(&dir).unwrap();
        for file in 0..9 {
            fs::write(dir.join(format!("f{file}")), vec![b'x'; 500 * file]).unwrap();
        }
        symlink("f1", dir.join("link")).unwrap();
        fs::hard_link(dir.join("f2"), root.join(format!("hard{names}"))).unwrap();
        names += 13;
    }
    let large = root.join("large");
    fs::create_dir(&large).unwrap();
    for file in 0..1500 {
        File::create(large.join(format!("{file}"))).unwrap();
    }
    // An entry as young as the index, in seconds, is compared again by each `git status`, which
    // writes the index.
    let git = "find . ! -type d -exec touch -h -d @1700000000 {} + && git init -q . && git add -A && \
               git -c user.email=a@b -c user.name=n commit -q -m c";
    shell(&format!("cd {} && {git}", root.join("d3").display()));
    names + 1501 + 100
}

#[test]
fn third_walk_sends_no_more_than_one_statfs() {
    let bed = Bed::new("1G");
    let mount = bed.mount(&[]);
    let names = plant(mount.root());
    mount.umount();
    let root = bed.mount_point();
    let root = root.display();
    for (line, statfs, changes) in [
        (format!("find {root} -ls"), 1, 0),
        (format!("find {root}"), 1, 0),
        (format!("du -s {root}"), 1, 0),
        (format!("tar cf /dev/null {root}"), 0, 0),
        (format!("grep -r unheard-of {root}"), 1, 0),
        (format!("git -C {root}/d3 --no-optional-locks status"), 0, 0),
        (format!("git -C {root}/d3 status"), 0, 8),
    ] {
        undisturbed(|| {
            // Each walk meets a kernel that remembers nothing.
            let mount = bed.mount(&[]);
            let [_, second, third, fourth] = [(); 4].map(|()| requests_of(&mount, || shell(&line)));
            mount.umount();
            let told = |of: &Requests, kind: &str| of.get(kind).copied().unwrap_or(0);
            let others = |of: &Requests| of.values().sum::<u64>() - told(of, "STATFS");
            let is_second = told(&second, "GETATTR") <= names
                && others(&second) - told(&second, "GETATTR") <= changes;
            let is_third = |of| told(of, "STATFS") <= statfs && others(of) <= changes;
            if is_second && is_third(&third) && is_third(&fourth) {
                return Ok(());
            }
            Err(format!("{line}: {second:?} {third:?} {fourth:?}"))
        });
    }
    bed.fsck();
}

/// Does `work` until it succeeds. It must do so while nothing takes pages from the caches of the
/// kernel, as other tests on this machine do. The pages that DAMON takes, a thread of the kernel that
/// looks for memory without use, are counted only when they are read again.
fn undisturbed(work: impl Fn() -> Result<(), String>) {
    let taken = || {
        let counters = fs::read_to_string("/proc/vmstat").unwrap();
        let of_interest = counters.lines().filter(|line| {
            let takes = ["drop_", "pgsteal_", "workingset_refault_file "];
            takes.iter().any(|counter| line.starts_with(counter))
        });
        of_interest.map(str::to_owned).collect::<Vec<_>>()
    };
    loop {
        let before = taken();
        match work() {
            Ok(()) => return,
            Err(message) => assert_ne!(taken(), before, "{message}"),
        }
    }
}

#[test]
fn seek_in_a_file_without_holes_leaves_its_pages() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let (dense, sparse) = (mount.root().join("dense"), mount.root().join("sparse"));
    fs::write(&dense, vec![b'x'; 300_000]).unwrap();
    let file = File::create(&sparse).unwrap();
    file.set_len(300_000).unwrap();
    drop(file);
    let reads = |path: &PathBuf| {
        let seek_and_read = || {
            let file = File::open(path).unwrap();
            let hole = rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(0)).unwrap();
            assert_eq!(hole, if *path == dense { 300_000 } else { 0 });
            drop(file);
            fs::read(path).unwrap();
        };
        seek_and_read();
        let requests = requests_of(&mount, seek_and_read);
        assert_eq!(requests.get("LSEEK"), Some(&1), "{requests:?}");
        requests.get("READ").copied().unwrap_or(0)
    };
    undisturbed(|| match reads(&dense) {
        0 => Ok(()),
        reads => Err(format!("{reads} reads of a file that the kernel has")),
    });
    // A program may have stored into the hole through a mapping, and the kernel alone has it.
    assert!(reads(&sparse) > 0);
    mount.umount();
}

/// Names that come and go.
const NAMES: usize = 12;
/// Names of the directories that stay: the kernel lists them with one request, or several.
const STAYING: [usize; 4] = [0, 3, 400, 1200];

/// A directory: small ones, which take less time, are chosen more often.
fn any_dir(rng: &mut StdRng) -> usize {
    match rng.random_range(0..100) {
        0..48 => 0,
        48..96 => 1,
        96..99 => 2,
        _ => 3,
    }
}

/// A directory, and its names as they should be.
struct Known {
    path: PathBuf,
    staying: usize,
    names: BTreeMap<String, FileType>,
    /// The directory, opened before all changes.
    held: Dir,
}

fn open(path: &Path) -> OwnedFd {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(rustix::fs::CWD, path, flags, Mode::empty()).unwrap()
}

impl Known {
    fn new(path: PathBuf, staying: usize) -> Self {
        fs::DirBuilder::new().mode(0o755).create(&path).unwrap();
        for name in 0..staying {
            File::create(path.join(format!("stays {name}"))).unwrap();
        }
        let held = Dir::new(open(&path)).unwrap();
        Self {
            path,
            staying,
            names: BTreeMap::new(),
            held,
        }
    }

    /// Compares the entries of a stream with the names.
    fn compare(&self, how: &str, listed: impl Iterator<Item = (String, FileType, u64)>) {
        let mut seen = BTreeMap::new();
        let mut staying = 0;
        for (name, kind, ino) in listed {
            if name.starts_with("stays") {
                staying += 1;
            } else if name != "." && name != ".." {
                let found = fs::symlink_metadata(self.path.join(&name)).unwrap();
                assert_eq!(found.ino(), ino, "{how}: {name} in {:?}", self.path);
                assert!(seen.insert(name, kind).is_none());
            }
        }
        assert_eq!(seen, self.names, "{how}: {:?}", self.path);
        assert_eq!(staying, self.staying, "{how}: {:?}", self.path);
    }

    /// Lists the directory, newly opened and from the descriptor that is held, and looks its names
    /// up.
    fn check(&mut self) {
        let listed = |dir: &mut Dir| -> Vec<_> {
            dir.map(|entry| {
                let entry = entry.unwrap();
                let name = entry.file_name().to_str().unwrap().to_owned();
                (name, entry.file_type(), entry.ino())
            })
            .collect()
        };
        self.held.rewind();
        let held = listed(&mut self.held);
        self.compare("rewound", held.into_iter());
        let opened = listed(&mut Dir::new(open(&self.path)).unwrap());
        self.compare("opened", opened.into_iter());
        for name in (0..NAMES).map(name) {
            let exists = fs::symlink_metadata(self.path.join(&name)).is_ok();
            assert_eq!(exists, self.names.contains_key(&name), "{name}");
        }
    }
}

fn name(number: usize) -> String {
    format!("n{number}")
}

/// Programs that list the directories all the time: to the end, in pieces, and not to the end.
fn read_on(dirs: &[(PathBuf, usize)], ends: &AtomicBool, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    while !ends.load(Ordering::Relaxed) {
        let (path, staying) = &dirs[any_dir(&mut rng)];
        let opened = open(path);
        let mut room = vec![std::mem::MaybeUninit::uninit(); rng.random_range(300..40_000)];
        let leaves_after = match rng.random_range(0..3) {
            0 => rng.random_range(1..30),
            _ => usize::MAX,
        };
        let mut seen = BTreeSet::new();
        let (mut listing, mut count) = (RawDir::new(&opened, &mut room), 0);
        while count < leaves_after
            && let Some(entry) = listing.next()
        {
            let found = entry.unwrap().file_name().to_str().unwrap().to_owned();
            count += 1;
            if found.starts_with("stays") {
                assert!(seen.insert(found), "{path:?}: a name is told twice");
            }
        }
        if count < leaves_after {
            assert_eq!(seen.len(), *staying, "{path:?}");
        }
    }
}

/// Directories of a mount, and their changes at random.
struct Changes<'a> {
    root: &'a Path,
    rng: StdRng,
    dirs: Vec<Known>,
}

impl Changes<'_> {
    fn clone_to(&self, source: &str, dir: usize, name: &str, flags: u32) {
        let mut named = NameRequest {
            name: source.as_bytes().to_vec(),
        }
        .encode()
        .unwrap();
        control_ioctl(File::open(self.root).unwrap(), SOURCE, &mut named).unwrap();
        let request = CloneRequest {
            flags,
            source: decode_source_reply(&named).unwrap().token,
            name: name.as_bytes().to_vec(),
        };
        let into = File::open(&self.dirs[dir].path).unwrap();
        control_ioctl(into, CLONE, &mut request.encode().unwrap()).unwrap();
    }

    /// Makes one change.
    fn change(&mut self) -> usize {
        let at = any_dir(&mut self.rng);
        let name = name(self.rng.random_range(0..NAMES));
        let path = self.dirs[at].path.join(&name);
        let file = FileType::RegularFile;
        match self.dirs[at].names.get(&name).copied() {
            None => {
                let kind = match self.rng.random_range(0..6) {
                    0 => {
                        File::create(&path).unwrap();
                        file
                    }
                    1 => {
                        fs::create_dir(&path).unwrap();
                        FileType::Directory
                    }
                    2 | 3 => {
                        self.clone_to("file", at, &name, 0);
                        file
                    }
                    _ => {
                        self.clone_to("tree", at, &name, 0);
                        FileType::Directory
                    }
                };
                self.dirs[at].names.insert(name, kind);
            }
            Some(kind) => match self.rng.random_range(0..6) {
                0 | 1 => {
                    let request = NameRequest {
                        name: name.as_bytes().to_vec(),
                    };
                    let above = File::open(&self.dirs[at].path).unwrap();
                    control_ioctl(above, REMOVE, &mut request.encode().unwrap()).unwrap();
                    self.dirs[at].names.remove(&name);
                }
                2 => {
                    let source = if kind == file { "file" } else { "tree" };
                    self.clone_to(source, at, &name, CLONE_REPLACE);
                }
                3 if kind == file => {
                    fs::remove_file(&path).unwrap();
                    self.dirs[at].names.remove(&name);
                }
                _ => self.rename(at, &name, kind),
            },
        }
        at
    }

    /// Renames to a name that is free, in the same directory or another one.
    fn rename(&mut self, at: usize, old: &str, kind: FileType) {
        let to = any_dir(&mut self.rng);
        let new = name(self.rng.random_range(0..NAMES));
        if self.dirs[to].names.contains_key(&new) {
            return;
        }
        let (from, into) = (&self.dirs[at].path, &self.dirs[to].path);
        fs::rename(from.join(old), into.join(&new)).unwrap();
        self.dirs[at].names.remove(old);
        self.dirs[to].names.insert(new, kind);
        self.dirs[to].check();
    }

    /// Sets the time of modification that the directory always had.
    fn turn_time_back(&self, at: usize) {
        let then = Timespec {
            tv_sec: 1_000_000_000,
            tv_nsec: 0,
        };
        let times = Timestamps {
            last_access: then,
            last_modification: then,
        };
        utimensat(
            rustix::fs::CWD,
            &self.dirs[at].path,
            &times,
            AtFlags::empty(),
        )
        .unwrap();
    }
}

#[test]
fn clones_removals_and_renames_show_in_kept_listings() {
    let rounds = number("RAMET_ROUNDS", 3000);
    let mut rng = seeded("clones_removals_and_renames_show_in_kept_listings");
    let seeds: [u64; 2] = rng.random();
    let bed = Bed::new("2G");
    let mount = bed.mount(&[]);
    let root = mount.root();
    fs::write(root.join("file"), "contents").unwrap();
    fs::create_dir(root.join("tree")).unwrap();
    fs::write(root.join("tree/f"), "contents").unwrap();
    let known = |(at, staying): (usize, &usize)| Known::new(root.join(format!("d{at}")), *staying);
    let mut changes = Changes {
        root,
        rng,
        dirs: STAYING.iter().enumerate().map(known).collect(),
    };
    let dirs = changes
        .dirs
        .iter()
        .map(|dir| (dir.path.clone(), dir.staying));
    let dirs: Vec<_> = dirs.collect();
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ended = EndOnDrop(&ends);
        let readers = seeds.map(|seed| {
            let (dirs, ends) = (&dirs, &ends);
            scope.spawn(move || read_on(dirs, ends, seed))
        });
        for round in 0..rounds {
            let at = changes.change();
            if round % 3 == 0 {
                changes.turn_time_back(at);
            }
            changes.dirs[at].check();
            assert!(readers.iter().all(|reader| !reader.is_finished()));
        }
        drop(ended);
    });
    drop(changes);
    mount.umount();
    bed.fsck();
}

/// Ends the readers also when the test fails.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A daemon that is stopped. Dropping it lets the daemon go on.
struct Stopped(Pid);

impl Stopped {
    /// Returns when all threads have stopped: each would answer a request until then.
    fn new(pid: Pid) -> Self {
        kill_process(pid, Signal::STOP).unwrap();
        let stopped = Self(pid);
        let threads = format!("/proc/{}/task", pid.as_raw_pid());
        let has_stopped = |thread: fs::DirEntry| {
            fs::read_to_string(thread.path().join("stat")).is_ok_and(|stat| stat.contains(") T "))
        };
        soon(|| fs::read_dir(&threads).unwrap().flatten().all(has_stopped));
        stopped
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        kill_process(self.0, Signal::CONT).unwrap();
    }
}

#[test]
fn clone_into_a_directory_that_a_stuck_program_reads_is_answered() {
    let (bed, other) = (Bed::new("256M"), Bed::new("256M"));
    let (mount, stopped) = (bed.mount(&[]), other.mount(&[]));
    let root = mount.root();
    let [tree, into] = ["tree", "into"].map(|name| root.join(name));
    for dir in [&tree, &into] {
        fs::create_dir(dir).unwrap();
    }
    // The kernel keeps the listing, and locks its page while it copies names.
    assert_eq!(fs::read_dir(&into).unwrap().count(), 0);
    let page = stopped.root().join("page");
    fs::write(&page, [0; 4096]).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stuck_reader.py");
    let mut reader = Command::new("python3")
        .args([&script, &into, &page])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = [0; 6];
    reader
        .stdout
        .take()
        .unwrap()
        .read_exact(&mut ready)
        .unwrap();
    let goes_on = Stopped::new(stopped.pid());
    reader.stdin.take().unwrap().write_all(b"\n").unwrap();
    let call = format!("/proc/{}/wchan", reader.id());
    let (sender, cloned) = channel();
    // The page of the program is on its way.
    soon(|| fs::read_to_string(&call).unwrap().contains("folio_wait"));
    std::thread::scope(|scope| {
        scope.spawn(|| sender.send(clone_timed(&tree, &into, "copy").unwrap()));
        let time = cloned.recv_timeout(SOON);
        drop(goes_on);
        assert!(time.is_ok(), "the clone waits for the program");
    });
    assert!(reader.wait().unwrap().success());
    let names = || fs::read_dir(&into).unwrap().count();
    soon(|| names() == 1);
    mount.umount();
    stopped.umount();
}

/// Waits for a notification of the kernel that no request waits for.
fn soon(mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < SOON, "the kernel does not hear of it");
        std::thread::yield_now();
    }
}

#[test]
fn directory_that_went_with_a_tree_is_empty_for_who_works_in_it() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let below = mount.root().join("tree/below/deep");
    fs::create_dir_all(&below).unwrap();
    fs::write(below.join("f"), "contents").unwrap();
    let mut held = Dir::new(open(&below)).unwrap();
    let mut count = || {
        held.rewind();
        held.by_ref().map(Result::unwrap).count()
    };
    assert_eq!([count(), count()], [3, 3]);
    mount.remove(&mount.root().join("tree"));
    // The kernel hears of it a moment later. A directory that was deleted lists nothing.
    soon(|| count() == 0);
    drop(held);
    mount.umount();
}

#[test]
fn directory_that_moves_lists_its_new_parent() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let [a, b] = ["a", "b"].map(|name| mount.root().join(name));
    for dir in [&a, &b, &a.join("x"), &b.join("y")] {
        fs::create_dir(dir).unwrap();
    }
    let parent = |dir: &Path| {
        let entries = Dir::new(open(dir)).unwrap().map(Result::unwrap);
        let parent = entries.filter(|entry| entry.file_name().to_bytes() == b"..");
        parent.map(|entry| entry.ino()).last().unwrap()
    };
    let number = |dir: &Path| fs::metadata(dir).unwrap().ino();
    assert_eq!(
        [parent(&a.join("x")), parent(&b.join("y"))],
        [number(&a), number(&b)]
    );
    fs::rename(a.join("x"), b.join("x")).unwrap();
    // The kernel hears of it a moment later.
    soon(|| parent(&b.join("x")) == number(&b));
    let cwd = rustix::fs::CWD;
    let exchange = rustix::fs::RenameFlags::EXCHANGE;
    fs::create_dir(a.join("z")).unwrap();
    assert_eq!(parent(&a.join("z")), number(&a));
    rustix::fs::renameat_with(cwd, a.join("z"), cwd, b.join("y"), exchange).unwrap();
    soon(|| [parent(&a.join("z")), parent(&b.join("y"))] == [number(&a), number(&b)]);
    mount.umount();
}
