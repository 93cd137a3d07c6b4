//! Watchers of files hear of clones, replacements and removals, and a command that dies leaves
//! nothing.
//!
//! Descriptors of inotify are polled with a deadline, and so is everything that a daemon does a
//! moment later. A request that is not answered fails when the [`Watchdog`] ends the mount.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use ramet_e2e::{Bed, Mount, force_unmount, kill_and_wait, number, ramet_bin, run_ok, seeded};
use ramet_fs::control::{
    NameRequest, SOURCE, STAGE, decode_source_reply, decode_stat_reply, encode_stat_reply,
};
use ramet_fs::{STAGED_NAME, StageReply, StageRequest};
use ramet_sys::control_ioctl;
use rand::Rng;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::fs::{Access, AtFlags, CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};

/// The longest that a test waits for something that should come at once.
const SOON: Duration = Duration::from_secs(20);
/// How long a watcher listens for events that should not come.
const QUIET: Duration = Duration::from_millis(300);
/// The longest that a test has a mount.
const TEST_MAX: Duration = Duration::from_secs(180);
/// Both ways of requests.
const TRANSPORTS: [&str; 2] = ["defaults", "no_io_uring"];
/// `nobody`, which every Debian has.
const OTHER: u32 = 65534;

/// Ends a mount that a test does not end in time: all requests fail then, and so does the test.
struct Watchdog(Option<Sender<()>>);

impl Watchdog {
    fn new(mount: &Mount, limit: Duration) -> Watchdog {
        let (dir, pid) = (mount.root().to_owned(), mount.pid());
        let (sender, ended) = channel();
        std::thread::spawn(move || {
            if ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                println!("the test takes too long: its mount is ended");
                force_unmount(&dir);
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            }
        });
        Watchdog(Some(sender))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.0.take());
    }
}

/// A volume and its mount, with a watchdog.
fn mounted(options: &str) -> (Bed, Mount, Watchdog) {
    let bed = Bed::new("1G");
    let mount = bed.mount(&["-o", options]);
    let watchdog = Watchdog::new(&mount, TEST_MAX);
    (bed, mount, watchdog)
}

/// A watcher of files.
struct Watcher {
    inotify: OwnedFd,
    labels: HashMap<i32, String>,
    heard: Vec<String>,
}

impl Watcher {
    fn new() -> Watcher {
        let flags = CreateFlags::NONBLOCK | CreateFlags::CLOEXEC;
        Watcher {
            inotify: inotify::init(flags).unwrap(),
            labels: HashMap::new(),
            heard: Vec::new(),
        }
    }

    /// Watches objects below `root` by the names given.
    fn of(root: &Path, names: &[&str]) -> Watcher {
        let mut watcher = Watcher::new();
        for name in names {
            let flags = WatchFlags::CREATE
                | WatchFlags::DELETE
                | WatchFlags::MOVE
                | WatchFlags::MOVE_SELF
                | WatchFlags::DELETE_SELF
                | WatchFlags::MODIFY
                | WatchFlags::OPEN;
            let watch = inotify::add_watch(&watcher.inotify, root.join(name), flags).unwrap();
            watcher.labels.insert(watch, (*name).to_owned());
        }
        watcher
    }

    /// Takes events in until `limit` has passed without one.
    fn listen(&mut self, limit: Duration) -> bool {
        let time = Timespec::try_from(limit).unwrap();
        let mut polled = [PollFd::new(&self.inotify, PollFlags::IN)];
        if poll(&mut polled, Some(&time)).unwrap() == 0 {
            return false;
        }
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(self.inotify.as_fd(), &mut buffer);
        loop {
            let event = match reader.next() {
                Ok(event) => event,
                Err(Errno::AGAIN) => return true,
                Err(error) => panic!("{error}"),
            };
            let told = event.events();
            let label = self.labels.get(&event.wd()).map_or("?", |label| label);
            let name = event
                .file_name()
                .map(|name| name.to_string_lossy().into_owned());
            let kinds = [
                (ReadFlags::CREATE, "CREATE"),
                (ReadFlags::DELETE, "DELETE"),
                (ReadFlags::MOVED_FROM, "MOVED_FROM"),
                (ReadFlags::MOVED_TO, "MOVED_TO"),
                (ReadFlags::MOVE_SELF, "MOVE_SELF"),
                (ReadFlags::DELETE_SELF, "DELETE_SELF"),
                (ReadFlags::MODIFY, "MODIFY"),
                (ReadFlags::OPEN, "OPEN"),
            ];
            for (_, kind) in kinds.iter().filter(|(flag, _)| told.contains(*flag)) {
                let name = name.as_deref().unwrap_or_default();
                self.heard.push(format!("{label}:{kind}:{name}"));
            }
            if reader.is_buffer_empty() {
                return true;
            }
        }
    }

    /// Waits for all of these events, and answers the place of each.
    fn hears(&mut self, expected: &[&str]) -> Vec<usize> {
        let began = Instant::now();
        loop {
            let place = |event: &&str| self.heard.iter().position(|heard| heard == event);
            let places: Option<Vec<usize>> = expected.iter().map(place).collect();
            if let Some(places) = places {
                return places;
            }
            assert!(began.elapsed() < SOON, "{expected:?} in {:?}", self.heard);
            self.listen(QUIET);
        }
    }

    /// The events, once there are no more, but for opened entries of the directory `dir`.
    fn all(&mut self, dir: &str) -> Vec<String> {
        let began = Instant::now();
        while self.listen(QUIET) {
            assert!(began.elapsed() < SOON, "no end of events: {:?}", self.heard);
        }
        let is_opened = |event: &str| event.starts_with(&format!("{dir}:OPEN:"));
        let opened = |event: &&String| !is_opened(event);
        self.heard.iter().filter(opened).cloned().collect()
    }
}

/// Waits for something that a daemon does a moment later.
fn soon(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < SOON, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Makes a tree `name` with a directory in a directory, and a file in that.
fn make_tree(root: &Path, name: &str, text: &str) {
    fs::create_dir_all(root.join(name).join("a/b")).unwrap();
    fs::write(root.join(name).join("a/b/f"), text).unwrap();
}

/// Looks at everything below, so that the kernel knows it.
fn look_at_all(dir: &Path) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        if entry.metadata().unwrap().is_dir() {
            look_at_all(&entry.path());
        }
    }
}

fn staged_changes(mount: &Mount) -> u64 {
    mount.stat()["staged_changes"].as_u64().unwrap()
}

/// Runs a test on a mount of each kind, then checks the volume.
fn on_both(test: impl Fn(&Mount)) {
    on_both_with_bed(|_, mount| test(mount));
}

fn on_both_with_bed(test: impl Fn(&Bed, &Mount)) {
    for transport in TRANSPORTS {
        let (bed, mount, _watchdog) = mounted(transport);
        test(&bed, &mount);
        soon("no staged change is left", || staged_changes(&mount) == 0);
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn watcher_hears_of_a_new_clone_and_of_no_other_name() {
    on_both(|mount| {
        let root = mount.root();
        make_tree(root, "src", "text");
        fs::write(root.join("file"), "text").unwrap();
        let mut watcher = Watcher::of(root, &["."]);
        mount.clone_path(&root.join("src"), &root.join("tree"));
        mount.clone_path(&root.join("file"), &root.join("copy"));
        watcher.hears(&[".:MOVED_TO:tree", ".:MOVED_TO:copy"]);
        let heard = watcher.all(".");
        assert_eq!(heard, [".:MOVED_TO:tree", ".:MOVED_TO:copy"]);
        let opened = watcher.heard.iter().filter(|event| event.contains("OPEN"));
        let known = |event: &String| [".:OPEN:", ".:OPEN:src"].contains(&&event[..]);
        assert!(opened.clone().all(known), "{:?}", watcher.heard);
        assert_eq!(fs::read_to_string(root.join("tree/a/b/f")).unwrap(), "text");
        assert_eq!(fs::read_to_string(root.join("copy")).unwrap(), "text");
    });
}

#[test]
fn watchers_hear_of_a_replaced_tree_from_the_bottom_up() {
    on_both(|mount| {
        let root = mount.root();
        make_tree(root, "src", "new");
        make_tree(root, "dst", "old");
        look_at_all(root);
        let mut watcher = Watcher::of(root, &[".", "dst", "dst/a", "dst/a/b", "dst/a/b/f"]);
        mount.replace_path(&root.join("src"), &root.join("dst"));
        watcher.hears(&["dst:MOVE_SELF:", "dst:DELETE_SELF:"]);
        let heard = watcher.all(".");
        let names = heard.iter().filter(|event| event.starts_with(".:"));
        // A watcher that believes the last event of a name knows that the new tree is there.
        let expected = [".:MOVED_FROM:dst", ".:MOVED_TO:dst"];
        assert!(names.eq(&expected), "{heard:?}");
        let places = watcher.hears(&[
            "dst/a/b/f:DELETE_SELF:",
            "dst/a/b:DELETE_SELF:",
            "dst/a:DELETE_SELF:",
            "dst:DELETE_SELF:",
        ]);
        assert!(places.is_sorted(), "{places:?} {:?}", watcher.heard);
        assert_eq!(fs::read_to_string(root.join("dst/a/b/f")).unwrap(), "new");
        // The new tree can be watched, and tells of its changes.
        let mut again = Watcher::of(root, &["dst/a/b"]);
        fs::write(root.join("dst/a/b/f"), "more").unwrap();
        again.hears(&["dst/a/b:MODIFY:f"]);
    });
}

#[test]
fn watchers_hear_that_a_tree_which_another_one_moves_over_is_gone() {
    on_both(|mount| {
        let root = mount.root();
        make_tree(root, "src", "new");
        make_tree(root, "dst", "old");
        look_at_all(root);
        let mut watcher = Watcher::of(root, &[".", "dst", "dst/a/b/f"]);
        let [src, dst] = ["src", "dst"].map(|name| root.join(name));
        let line = [Path::new("mv"), Path::new("--replace"), &src, &dst];
        run_ok(ramet_bin(), &line);
        watcher.hears(&["dst/a/b/f:DELETE_SELF:", "dst:DELETE_SELF:"]);
        let heard = watcher.all(".");
        let names = heard.iter().filter(|event| event.starts_with(".:"));
        // The two exchange their names, and the old tree goes by its new name. The last event of each
        // name is right.
        let expected = [
            ".:MOVED_FROM:dst",
            ".:MOVED_TO:src",
            ".:MOVED_FROM:src",
            ".:MOVED_TO:dst",
            ".:MOVED_FROM:src",
        ];
        assert!(names.eq(&expected), "{heard:?}");
        assert!(!src.exists());
        assert_eq!(fs::read_to_string(dst.join("a/b/f")).unwrap(), "new");
    });
}

#[test]
fn watchers_hear_last_that_a_tree_which_was_received_is_there() {
    on_both(|mount| {
        let root = mount.root();
        make_tree(root, "src", "new");
        make_tree(root, "dst/src", "old");
        let mut watcher = Watcher::of(root, &["dst"]);
        let pipe = r#""$1" send "$2" | "$1" receive --replace "$3""#;
        let [src, dst] = ["src", "dst"].map(|name| root.join(name));
        let args = ["-ec".as_ref(), pipe.as_ref(), "sh".as_ref(), ramet_bin()];
        run_ok("sh", &[&args[..], &[&src, &dst]].concat());
        assert_eq!(fs::read_to_string(dst.join("src/a/b/f")).unwrap(), "new");
        let heard = watcher.all("dst");
        let last = heard.iter().rfind(|event| event.ends_with(":src"));
        assert_eq!(last.unwrap(), "dst:MOVED_TO:src", "{heard:?}");
    });
}

#[test]
fn watchers_hear_of_a_removed_tree_from_the_bottom_up() {
    on_both(|mount| {
        let root = mount.root();
        make_tree(root, "gone", "old");
        look_at_all(root);
        let mut watcher = Watcher::of(root, &[".", "gone", "gone/a", "gone/a/b", "gone/a/b/f"]);
        mount.remove(&root.join("gone"));
        watcher.hears(&[".:MOVED_FROM:gone", "gone:MOVE_SELF:"]);
        let places = watcher.hears(&[
            "gone/a/b/f:DELETE_SELF:",
            "gone/a/b:DELETE_SELF:",
            "gone/a:DELETE_SELF:",
            "gone:DELETE_SELF:",
        ]);
        assert!(places.is_sorted(), "{places:?} {:?}", watcher.heard);
        assert!(!root.join("gone").exists());
        fs::write(root.join("file"), "text").unwrap();
        mount.remove(&root.join("file"));
        watcher.hears(&[".:DELETE:file"]);
    });
}

#[test]
fn watcher_of_a_replaced_file_hears_that_it_is_gone() {
    on_both(|mount| {
        let root = mount.root();
        for (name, text) in [("src", "new"), ("dst", "old")] {
            fs::write(root.join(name), text).unwrap();
        }
        let mut watcher = Watcher::of(root, &[".", "dst"]);
        mount.replace_path(&root.join("src"), &root.join("dst"));
        watcher.hears(&[".:MOVED_TO:dst", "dst:DELETE_SELF:"]);
        assert_eq!(fs::read_to_string(root.join("dst")).unwrap(), "new");
    });
}

/// A child that is killed at the end, and reaped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let began = Instant::now();
        // A child that waits in the kernel does not end.
        while matches!(self.0.try_wait(), Ok(None)) && began.elapsed() < SOON {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn tail_follows_the_name_over_a_replacement() {
    let (bed, mount, watchdog) = mounted("defaults");
    let root = mount.root();
    fs::write(root.join("log"), "first\n").unwrap();
    fs::write(root.join("next"), "second\n").unwrap();
    let said = bed.path().join("said");
    let tail = Command::new("tail")
        .args(["-F", "-n", "+1", "log"])
        .current_dir(root)
        .stdin(Stdio::null())
        .stdout(File::create(&said).unwrap())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let tail = Killed(tail);
    let says = |text: &str| fs::read_to_string(&said).unwrap().contains(text);
    soon("tail shows the file", || says("first"));
    mount.replace_path(&root.join("next"), &root.join("log"));
    soon("tail shows the file that replaced it", || says("second"));
    drop(tail);
    mount.umount();
    drop(watchdog);
    bed.fsck();
}

#[test]
fn watcher_hears_of_a_restored_tree_and_of_one_that_it_replaces() {
    on_both(|mount| {
        let root = mount.root();
        make_tree(root, "tree", "then");
        let ramet = |args: &[&str]| {
            let done = Command::new(ramet_bin())
                .args(args)
                .current_dir(root)
                .output();
            let done = done.unwrap();
            assert!(done.status.success(), "{args:?} {done:?}");
        };
        ramet(&["snapshot", "create", ".", "s"]);
        fs::write(root.join("tree/a/b/f"), "now").unwrap();
        let mut watcher = Watcher::of(root, &[".", "tree", "tree/a"]);
        ramet(&["restore", "--at", "s", "tree", "copy"]);
        watcher.hears(&[".:MOVED_TO:copy"]);
        ramet(&["restore", "--at", "s", "--replace", "tree"]);
        watcher.hears(&[".:MOVED_TO:tree", "tree:MOVE_SELF:", "tree/a:DELETE_SELF:"]);
        for name in ["copy", "tree"] {
            let text = fs::read_to_string(root.join(name).join("a/b/f")).unwrap();
            assert_eq!(text, "then", "{name}");
        }
    });
}

#[test]
fn a_clone_keeps_the_number_that_it_was_staged_with_and_gets_its_attributes() {
    on_both(|mount| {
        let root = mount.root();
        make_tree(root, "src", "text");
        let set = |path: &Path, mode| {
            fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        };
        set(&root.join("src"), 0o2551);
        set(&root.join("src/a/b/f"), 0o640);
        mount.clone_path(&root.join("src"), &root.join("tree"));
        mount.clone_path(&root.join("src/a/b/f"), &root.join("file"));
        let look = |name: &str| {
            let found = fs::symlink_metadata(root.join(name)).unwrap();
            (found.ino(), found.mode() & 0o7777, found.nlink())
        };
        let (tree, file) = (look("tree"), look("file"));
        assert_eq!((tree.1, tree.2), (0o2551, 3));
        assert_eq!((file.1, file.2), (0o640, 1));
        let open = fs::read_dir(root.join("tree")).unwrap().count();
        assert_eq!(open, 1);
        let below = look("tree/a").0;
        let numbers = [tree.0, file.0, below, look("src").0, look("src/a").0];
        let distinct: std::collections::HashSet<_> = numbers.iter().collect();
        assert_eq!(distinct.len(), numbers.len(), "{numbers:?}");
        // A name that moves keeps its number, and one that the kernel forgot is the same again.
        fs::rename(root.join("tree"), root.join("moved")).unwrap();
        if is_root() {
            fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
        }
        assert_eq!((look("moved").0, look("file").0), (tree.0, file.0));
        assert_eq!(
            fs::read_to_string(root.join("moved/a/b/f")).unwrap(),
            "text"
        );
        set(&root.join("moved"), 0o755);
        set(&root.join("src"), 0o755);
    });
}

/// The request to clone `source` in `dir` to a new name.
fn clone_request(dir: &Path, source: &str, name: &str) -> StageRequest {
    let request = NameRequest {
        name: source.into(),
    };
    let mut bytes = request.encode().unwrap();
    control_ioctl(File::open(dir).unwrap(), SOURCE, &mut bytes).unwrap();
    StageRequest::Clone {
        source: decode_source_reply(&bytes).unwrap().token,
        name: name.into(),
        replace: false,
    }
}

/// Clones a file in a new directory of a user, whose watcher hears of it.
fn clone_as(bed: &Bed, root: &Path, user: Option<u32>) {
    let dir = root.join("free");
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("file"), "text").unwrap();
    for path in [&dir, &dir.join("file")] {
        std::os::unix::fs::chown(path, user, user).unwrap();
    }
    let bin = bed.command_for_others();
    let mut watcher = Watcher::of(root, &["free"]);
    let mut command = Command::new(bin);
    command.args(["clone", "file", "copy"]).current_dir(&dir);
    if let Some(user) = user {
        command.uid(user).gid(user);
    }
    assert!(command.status().unwrap().success());
    watcher.hears(&["free:MOVED_TO:copy"]);
}

/// A process that is stopped. Dropping it lets the process go on.
struct Continued(Pid);

impl Drop for Continued {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(self.0, Signal::CONT);
    }
}

/// Programs that hold the locks of directories. They copy names to pages of a mount whose daemon is
/// stopped.
struct StuckReaders {
    goes_on: Continued,
    readers: Vec<Killed>,
}

impl StuckReaders {
    /// Returns when a program waits in each of `dirs`. The file `ready` is new, and so are the files
    /// of that name with a number.
    fn start(dirs: &[&Path], elsewhere: &Mount, ready: &Path) -> StuckReaders {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stuck_reader.py");
        let begin = |(at, dir): (usize, &&Path)| {
            let ready = ready.with_extension(at.to_string());
            let page = elsewhere.root().join(ready.file_name().unwrap());
            fs::write(&page, [0; 4096]).unwrap();
            let reader = Command::new("python3")
                .args([script.as_path(), dir, &page])
                .stdin(Stdio::piped())
                .stdout(File::create(&ready).unwrap())
                .spawn();
            let reader = Killed(reader.unwrap());
            let is_ready = || fs::read_to_string(&ready).unwrap() == "ready\n";
            soon("the reader is ready", is_ready);
            reader
        };
        let mut readers: Vec<_> = dirs.iter().enumerate().map(begin).collect();
        rustix::process::kill_process(elsewhere.pid(), Signal::STOP).unwrap();
        let goes_on = Continued(elsewhere.pid());
        // A thread that has not stopped yet would answer.
        let runs = |stat: &str| !stat.contains(") T ");
        soon("the daemon stops", || {
            !has_thread(elsewhere.pid(), "stat", runs)
        });
        for reader in &mut readers {
            reader.0.stdin.take().unwrap().write_all(b"\n").unwrap();
            let call = format!("/proc/{}/wchan", reader.0.id());
            soon("the reader waits", || {
                fs::read_to_string(&call).unwrap().contains("folio_wait")
            });
        }
        StuckReaders { goes_on, readers }
    }

    /// Lets the daemon go on, and so the programs.
    fn end(self) {
        let StuckReaders {
            goes_on,
            mut readers,
        } = self;
        drop(goes_on);
        for reader in &mut readers {
            soon("the reader ends", || reader.0.try_wait().unwrap().is_some());
        }
    }
}

/// A change that this process has staged in `dir`.
struct Staged {
    dir: File,
    reply: StageReply,
}

impl Staged {
    fn try_new(dir: &Path, request: &StageRequest) -> io::Result<Staged> {
        Staged::try_with(&File::open(dir)?, request)
    }

    fn try_with(dir: &File, request: &StageRequest) -> io::Result<Staged> {
        let dir = dir.try_clone()?;
        let mut bytes = encode_stat_reply(&serde_json::to_string(request)?).unwrap();
        control_ioctl(&dir, STAGE, &mut bytes)?;
        let reply = serde_json::from_str(decode_stat_reply(&bytes).unwrap())?;
        Ok(Staged { dir, reply })
    }

    fn clone_of(dir: &Path, source: &str, name: &str, replace: bool) -> Staged {
        let mut request = clone_request(dir, source, name);
        if let StageRequest::Clone { replace: its, .. } = &mut request {
            *its = replace;
        }
        Staged::try_new(dir, &request).unwrap()
    }

    fn open(&self) -> rustix::io::Result<OwnedFd> {
        open_path(&self.dir, &self.reply.dir)
    }
}

fn open_path(dir: impl AsFd, name: &str) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(dir, name, flags, Mode::empty())
}

#[test]
fn a_staged_directory_is_opened_once_and_holds_nothing_but_the_change() {
    on_both(|mount| {
        let root = mount.root();
        make_tree(root, "src", "text");
        make_tree(root, "other", "text");
        let staged = Staged::clone_of(root, "src", "dst", false);
        let held = staged.open().unwrap();
        assert_eq!(staged.open().unwrap_err(), Errno::NOENT, "once");
        let found = rustix::fs::fstat(&held).unwrap();
        assert_eq!(found.st_mode, 0o40_700);
        let path = PathBuf::from(format!(
            "/proc/self/fd/{}",
            std::os::fd::AsRawFd::as_raw_fd(&held)
        ));
        let refused = |done: io::Result<()>| {
            let error = done.unwrap_err();
            let errno = Errno::from_io_error(&error);
            assert_eq!(errno, Some(Errno::AGAIN), "{error}");
        };
        refused(fs::create_dir(path.join("new")));
        refused(fs::write(path.join("new"), "text"));
        refused(fs::read_dir(&path).and_then(|mut all| all.next().unwrap().map(drop)));
        refused(fs::set_permissions(&path, PermissionsExt::from_mode(0o777)));
        let object = path.join(STAGED_NAME);
        let shown = fs::symlink_metadata(&object).unwrap();
        assert_eq!((shown.mode(), shown.nlink()), (0o40_700, 2));
        refused(fs::set_permissions(
            &object,
            PermissionsExt::from_mode(0o777),
        ));
        refused(fs::create_dir(object.join("new")));
        refused(fs::metadata(object.join("a")).map(drop));
        let rename = |from: (&OwnedFd, &str), to: (&File, &str), flags| {
            rustix::fs::renameat_with(from.0, from.1, to.0, to.1, flags)
        };
        let none = RenameFlags::NOREPLACE;
        let elsewhere = rename((&held, STAGED_NAME), (&staged.dir, "elsewhere"), none);
        assert_eq!(elsewhere, Err(Errno::PERM), "another name");
        let into = rustix::fs::renameat_with(&staged.dir, "other", &held, "other", none);
        assert_eq!(into, Err(Errno::AGAIN), "another name in it");
        let into = rustix::fs::renameat_with(&staged.dir, "other", &held, STAGED_NAME, none);
        assert!(into.is_err(), "another object");
        let below = File::open(root.join("other")).unwrap();
        let below = rename((&held, STAGED_NAME), (&below, "dst"), none);
        assert_eq!(below, Err(Errno::PERM), "another directory");
        let over = rename(
            (&held, STAGED_NAME),
            (&staged.dir, "dst"),
            RenameFlags::empty(),
        );
        assert_eq!(over, Err(Errno::PERM), "another way");
        assert!(!root.join("dst").exists());
        rename((&held, STAGED_NAME), (&staged.dir, "dst"), none).unwrap();
        assert_eq!(fs::read_to_string(root.join("dst/a/b/f")).unwrap(), "text");
        assert_eq!(fs::metadata(root.join("dst")).unwrap().ino(), shown.ino());
        let again = rename((&held, STAGED_NAME), (&staged.dir, "dst"), none);
        assert!(again.is_err(), "once");
    });
}

#[test]
fn another_object_of_the_name_is_neither_replaced_nor_removed() {
    on_both(|mount| {
        let root = mount.root();
        for name in ["src", "dst", "spare"] {
            make_tree(root, name, name);
        }
        let exchange = |a: &str, b: &str| {
            let (a, b) = (root.join(a), root.join(b));
            rustix::fs::renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE).unwrap();
        };
        let staged = Staged::clone_of(root, "src", "dst", true);
        let held = staged.open().unwrap();
        let name = b"dst".to_vec();
        let removal = Staged::try_new(root, &StageRequest::Remove { name }).unwrap();
        let into = removal.open().unwrap();
        exchange("dst", "spare");
        let flags = RenameFlags::EXCHANGE;
        let replaced = rustix::fs::renameat_with(&staged.dir, "dst", &held, STAGED_NAME, flags);
        assert_eq!(replaced, Err(Errno::STALE));
        let none = RenameFlags::NOREPLACE;
        let removed = rustix::fs::renameat_with(&removal.dir, "dst", &into, STAGED_NAME, none);
        assert_eq!(removed, Err(Errno::STALE));
        let text = |name: &str| fs::read_to_string(root.join(name).join("a/b/f")).unwrap();
        assert_eq!([text("dst"), text("spare")], ["spare", "dst"]);
        exchange("dst", "spare");
        rustix::fs::renameat_with(&staged.dir, "dst", &held, STAGED_NAME, flags).unwrap();
        assert_eq!([text("dst"), text("spare")], ["src", "spare"]);
    });
}

#[test]
fn another_user_finds_no_staged_name() {
    if !is_root() {
        println!("not root: there is no other user");
        return;
    }
    // A name that nobody opens goes after five seconds.
    let (rounds, tries) = (20, number("RAMET_TRIES", 100_000) / 20);
    let mut rng = seeded("another_user_finds_no_staged_name");
    let (bed, mount, watchdog) = mounted("defaults");
    let root = mount.root();
    make_tree(root, "src", "text");
    fs::set_permissions(root, PermissionsExt::from_mode(0o777)).unwrap();
    let dir = File::open(root).unwrap();
    let mut found = 0;
    for round in 0..rounds {
        let staged = Staged::clone_of(root, "src", "dst", false);
        // In every other round its owner has opened it.
        let held = (round % 2 == 1).then(|| staged.open().unwrap());
        let mut guess = || {
            let user = rustix::thread::Uid::from_raw(OTHER);
            rustix::thread::set_thread_uid(user).unwrap();
            let guesses = (0..tries).map(|_| format!("{:032x}", rng.random::<u128>()));
            let known = std::iter::once(staged.reply.dir.clone());
            let opens = |name: String| match open_path(&dir, &name) {
                Ok(_) => true,
                Err(Errno::NOENT) => false,
                Err(error) => panic!("{error}"),
            };
            let opened = guesses.chain(known).map(opens);
            opened.filter(|opened| *opened).count()
        };
        found += std::thread::scope(|scope| scope.spawn(&mut guess).join().unwrap());
        drop(held);
    }
    assert_eq!(
        found, 0,
        "of {rounds} times {tries} guesses, and the names themselves"
    );
    drop(dir);
    // Nobody opened the others, so they go.
    soon("the staged changes go", || staged_changes(&mount) == 0);
    mount.umount();
    drop(watchdog);
    bed.fsck();
}

#[test]
fn a_command_that_is_killed_leaves_the_state_before_or_after() {
    let kills = number("RAMET_KILLS", 200);
    let mut rng = seeded("a_command_that_is_killed_leaves_the_state_before_or_after");
    let (bed, mount, watchdog) = mounted("defaults");
    let root = mount.root();
    make_tree(root, "one", "one");
    make_tree(root, "two", "two");
    let (mut before, mut after) = (0, 0);
    let text = || fs::read_to_string(root.join("dst/a/b/f")).ok();
    let mut last = text();
    let began = Instant::now();
    for _ in 0..10 {
        mount.clone_path(&root.join("one"), &root.join("dst"));
        mount.remove(&root.join("dst"));
    }
    // Half of the commands, about, are killed before they make their change.
    let longest = u64::try_from(began.elapsed().as_micros() / 20 * 2).unwrap();
    for round in 0..kills {
        let args: &[&str] = match round % 4 {
            0 => &["clone", "one", "dst"],
            1 => &["clone", "--replace", "two", "dst"],
            2 => &["clone", "--replace", "one", "dst"],
            _ => &["rm", "dst"],
        };
        let child = Command::new(ramet_bin())
            .args(args)
            .current_dir(root)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let mut child = Killed(child.unwrap());
        std::thread::sleep(Duration::from_micros(rng.random_range(0..longest)));
        child.0.kill().unwrap();
        drop(child);
        let aim = match round % 4 {
            0 if last.is_some() => last.clone(),
            0 | 2 => Some("one".to_owned()),
            1 => Some("two".to_owned()),
            _ => None,
        };
        let now = text();
        assert!(
            [&last, &aim].contains(&&now),
            "{args:?}: {last:?} to {now:?}"
        );
        let names: Vec<_> = fs::read_dir(root)
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        let is_known = |name| ["one", "two", "dst"].iter().any(|known| name == *known);
        assert!(names.iter().all(is_known), "{names:?}");
        if now == last && aim != last {
            before += 1;
        } else if now != last {
            after += 1;
        }
        last = now;
    }
    println!("{kills} kills: {before} before the change, {after} after it");
    assert!(
        before > kills / 20 && after > kills / 20,
        "{before} and {after}"
    );
    soon("no staged change is left", || staged_changes(&mount) == 0);
    mount.umount();
    drop(watchdog);
    bed.fsck();
}

/// Steps of a command at which it can be killed. Its change is made before the last one.
#[cfg(failpoints)]
const STEPS: [&str; 4] = ["staged", "staged-opened", "staged-told", "staged-renamed"];

#[cfg(failpoints)]
#[test]
#[ignore = "needs a program with failpoints: ./soak steps"]
fn a_command_that_is_killed_at_any_step_leaves_nothing_staged() {
    use std::os::unix::process::ExitStatusExt;
    on_both(|mount| {
        let root = mount.root();
        make_tree(root, "one", "one");
        make_tree(root, "two", "two");
        let text = || fs::read_to_string(root.join("dst/a/b/f")).ok();
        let [one, two] = ["one", "two"].map(|text| Some(text.to_owned()));
        for (args, made) in [
            (&["clone", "one", "dst"][..], &one),
            (&["clone", "--replace", "two", "dst"], &two),
            (&["clone", "--replace", "one", "dst"], &one),
            (&["rm", "dst"], &None),
        ] {
            let before = text();
            for step in STEPS {
                let mut command = Command::new(ramet_bin());
                let command = command.args(args).current_dir(root);
                let mut child = Killed(command.env("RAMET_DIES_AT", step).spawn().unwrap());
                let deadline = Instant::now() + Duration::from_secs(60);
                let status = loop {
                    if let Some(status) = child.0.try_wait().unwrap() {
                        break status;
                    }
                    assert!(Instant::now() < deadline, "{args:?} ends at {step}");
                    std::thread::sleep(Duration::from_millis(2));
                };
                assert_eq!(status.signal(), Some(9), "{args:?} at {step}: {status}");
                let is_made = step == "staged-renamed";
                let expected = if is_made { made } else { &before };
                assert_eq!(&text(), expected, "{args:?} at {step}");
                let names = fs::read_dir(root).unwrap().count();
                assert_eq!(
                    names,
                    2 + usize::from(expected.is_some()),
                    "{args:?} at {step}"
                );
            }
        }
        soon("no staged change is left", || staged_changes(mount) == 0);
    });
}

#[test]
fn a_daemon_that_dies_between_leaves_nothing_staged() {
    let (bed, mount, watchdog) = mounted("defaults");
    make_tree(mount.root(), "src", "text");
    make_tree(mount.root(), "dst", "old");
    ramet_e2e::run_ok(ramet_bin(), &["sync".as_ref(), mount.root().as_os_str()]);
    let staged = Staged::clone_of(mount.root(), "src", "dst", true);
    let held = staged.open().unwrap();
    rustix::fs::statat(&held, STAGED_NAME, AtFlags::SYMLINK_NOFOLLOW).unwrap();
    kill_and_wait(mount.pid());
    let flags = RenameFlags::EXCHANGE;
    let late = rustix::fs::renameat_with(&staged.dir, "dst", &held, STAGED_NAME, flags);
    assert!(late.is_err());
    drop((held, staged));
    mount.detach_dead();
    bed.fsck();
    let mount = bed.mount(&[]);
    let root = mount.root();
    assert_eq!(fs::read_to_string(root.join("dst/a/b/f")).unwrap(), "old");
    assert_eq!(fs::read_dir(root).unwrap().count(), 2);
    mount.umount();
    drop(watchdog);
    bed.fsck();
}

#[test]
fn changes_that_are_made_do_not_count_although_files_of_the_old_trees_are_open() {
    on_both(|mount| {
        let root = mount.root();
        make_tree(root, "src", "new");
        make_tree(root, "dst", "old");
        // More than a user may have staged at once.
        let mut held = Vec::new();
        for _ in 0..70 {
            held.push(File::open(root.join("dst/a/b/f")).unwrap());
            mount.replace_path(&root.join("src"), &root.join("dst"));
        }
        assert_eq!(staged_changes(mount), 0);
        let mut watcher = Watcher::of(root, &["."]);
        mount.replace_path(&root.join("src"), &root.join("dst"));
        watcher.hears(&[".:MOVED_TO:dst"]);
        assert_eq!(io::read_to_string(&held[0]).unwrap(), "old");
        assert_eq!(io::read_to_string(&held[69]).unwrap(), "new");
    });
}

#[test]
fn a_change_is_made_by_ioctl_while_64_changes_of_its_user_wait() {
    let (bed, mount, watchdog) = mounted("defaults");
    let root = mount.root();
    make_tree(root, "src", "new");
    let stage = |_| {
        let staged = Staged::clone_of(root, "src", "dst", false);
        let held = staged.open().unwrap();
        (staged, held)
    };
    let held: Vec<_> = (0..64).map(stage).collect();
    mount.clone_path(&root.join("src"), &root.join("by-ioctl"));
    assert_eq!(
        fs::read_to_string(root.join("by-ioctl/a/b/f")).unwrap(),
        "new"
    );
    assert_eq!(staged_changes(&mount), 64);
    drop(held);
    soon("no staged change is left", || staged_changes(&mount) == 0);
    mount.umount();
    drop(watchdog);
    bed.fsck();
}

#[test]
fn a_directory_whose_lock_is_held_does_not_hold_changes_in_others_up() {
    let (other, elsewhere, other_watchdog) = mounted("defaults");
    let (bed, mount, watchdog) = mounted("defaults");
    let root = mount.root();
    make_tree(root, "src", "text");
    fs::create_dir(root.join("locked")).unwrap();
    assert_eq!(fs::read_dir(root.join("locked")).unwrap().count(), 0);
    let staged = Staged::try_new(&root.join("locked"), &clone_request(root, "src", "dst")).unwrap();
    let held = staged.open().unwrap();
    let reader = StuckReaders::start(
        &[&root.join("locked")],
        &elsewhere,
        &bed.path().join("ready"),
    );
    // Calls in the locked directory end, first after a second and then at once.
    let mut times = Vec::new();
    for _ in 0..20 {
        let began = Instant::now();
        let request = clone_request(root, "src", "dst");
        let error = Staged::try_with(&staged.dir, &request).err().unwrap();
        assert_eq!(Errno::from_io_error(&error), Some(Errno::BUSY));
        times.push(began.elapsed());
    }
    assert!(times[0] > Duration::from_millis(500), "{times:?}");
    assert!(times[19] < Duration::from_millis(500), "{times:?}");
    // Meanwhile the daemon tries to have entries of the staged directory dropped.
    std::thread::sleep(Duration::from_secs(8));
    let user = is_root().then_some(OTHER);
    let began = Instant::now();
    clone_as(&bed, root, user);
    assert!(
        began.elapsed() < Duration::from_millis(900),
        "{:?}",
        began.elapsed()
    );
    reader.end();
    drop((held, staged));
    soon("no staged change is left", || staged_changes(&mount) == 0);
    mount.umount();
    drop(watchdog);
    bed.fsck();
    elsewhere.umount();
    drop((other, other_watchdog));
}

#[test]
fn a_daemon_that_is_killed_while_it_tells_of_a_large_tree_ends() {
    for transport in TRANSPORTS {
        let (bed, mount, watchdog) = mounted(transport);
        let root = mount.root();
        for at in 0..40 {
            let dir = root.join(format!("tree/d{at}"));
            fs::create_dir_all(&dir).unwrap();
            for file in 0..100 {
                fs::write(dir.join(format!("f{file}")), "").unwrap();
            }
        }
        look_at_all(root);
        let lists = || {
            let tree = root.join("tree");
            let mut list = Command::new("find");
            list.arg(&tree).stdin(Stdio::null());
            list.stdout(Stdio::null()).stderr(Stdio::null()).spawn()
        };
        let programs: Vec<_> = (0..4).map(|_| Killed(lists().unwrap())).collect();
        mount.remove(&root.join("tree"));
        kill_and_wait(mount.pid());
        drop(programs);
        mount.detach_dead();
        drop(watchdog);
        bed.fsck();
    }
}

/// Whether the files of a daemon's threads in `/proc` are such that `is_so`, for one of them.
fn has_thread(daemon: Pid, file: &str, is_so: impl Fn(&str) -> bool) -> bool {
    let threads = fs::read_dir(format!("/proc/{}/task", daemon.as_raw_pid()));
    let mut threads = threads.into_iter().flatten().flatten();
    threads.any(|thread| is_so(&fs::read_to_string(thread.path().join(file)).unwrap_or_default()))
}

/// Whether a thread of a daemon tells the kernel of a deletion, and waits for the lock.
fn tells_of_a_deletion(daemon: Pid) -> bool {
    has_thread(daemon, "wchan", |call| {
        call.contains("fuse_reverse_inval_entry")
    })
}

/// Whether a thread of a daemon waits in the kernel. Any user sees that.
fn waits(daemon: Pid) -> bool {
    has_thread(daemon, "stat", |stat| stat.contains(") D "))
}

#[test]
fn directories_whose_locks_are_held_do_not_hold_up_the_deletions_of_another_user() {
    if !is_root() {
        println!("not root: no user can be chosen");
        return;
    }
    let (other, elsewhere, other_watchdog) = mounted("defaults");
    let (bed, mount, watchdog) = mounted("defaults");
    let root = mount.root();
    let trees: Vec<_> = (0..9).map(|at| format!("tree{at}")).collect();
    trees.iter().for_each(|tree| make_tree(root, tree, "text"));
    make_tree(root, "home/tree", "text");
    look_at_all(root);
    let owner = format!("{OTHER}:{OTHER}");
    run_ok(
        "chown",
        &["-R".as_ref(), owner.as_ref(), root.join("home").as_os_str()],
    );
    let held: Vec<_> = trees
        .iter()
        .map(|tree| root.join(tree).join("a/b"))
        .collect();
    let held: Vec<_> = held.iter().map(PathBuf::as_path).collect();
    let readers = StuckReaders::start(&held, &elsewhere, &bed.path().join("ready"));
    trees.iter().for_each(|tree| mount.remove(&root.join(tree)));
    soon("a thread waits", || tells_of_a_deletion(mount.pid()));
    let mut watcher = Watcher::of(root, &["home/tree/a/b"]);
    let mut command = Command::new(bed.command_for_others());
    command.args(["rm", "tree"]).current_dir(root.join("home"));
    assert!(command.uid(OTHER).gid(OTHER).status().unwrap().success());
    watcher.hears(&["home/tree/a/b:DELETE_SELF:"]);
    readers.end();
    drop(watcher);
    mount.umount();
    drop(watchdog);
    bed.fsck();
    elsewhere.umount();
    drop((other, other_watchdog));
}

/// Has a daemon end by a signal while a thread of it waits in the kernel.
fn requests_fail_after(signal: Signal, transport: &str, elsewhere: &Mount) {
    let (bed, mount, watchdog) = mounted(transport);
    let root = mount.root();
    make_tree(root, "tree", "text");
    look_at_all(root);
    let ready = format!("{transport}-{}", signal.as_raw());
    let ready = bed.path().join(ready);
    let reader = StuckReaders::start(&[&root.join("tree/a/b")], elsewhere, &ready);
    mount.remove(&root.join("tree"));
    soon("a thread waits", || tells_of_a_deletion(mount.pid()));
    rustix::process::kill_process(mount.pid(), signal).unwrap();
    let (failed, has_failed) = channel();
    let root = root.to_owned();
    std::thread::spawn(move || {
        // The kernel keeps the answer to a name that is asked for again.
        for at in 0.. {
            let error = fs::symlink_metadata(root.join(format!("none{at}"))).unwrap_err();
            if Errno::from_io_error(&error) != Some(Errno::NOENT) {
                return failed.send(Errno::from_io_error(&error));
            }
        }
        Ok(())
    });
    let error = has_failed.recv_timeout(SOON);
    // The last one is that of a request that a ring had.
    let ends = [Errno::CONNABORTED, Errno::NOTCONN, Errno::CANCELED];
    let is_aborted = matches!(error, Ok(Some(errno)) if ends.contains(&errno));
    let still_waits = waits(mount.pid());
    assert!(is_aborted, "{signal:?}, {transport}: {error:?}");
    assert!(still_waits, "{signal:?}, {transport}: nothing was tested");
    reader.end();
    kill_and_wait(mount.pid());
    mount.detach_dead();
    drop(watchdog);
    bed.fsck();
}

#[test]
fn requests_fail_when_a_daemon_ends_by_a_signal_while_a_thread_of_it_waits() {
    let connections = fs::read_dir("/sys/fs/fuse/connections");
    if !is_root() && connections.is_ok_and(|mut all| all.next().is_none()) {
        println!("the watcher of an ordinary user needs fusectl");
        return;
    }
    let (other, elsewhere, other_watchdog) = mounted("defaults");
    for transport in TRANSPORTS {
        for signal in [Signal::KILL, Signal::ABORT, Signal::SEGV] {
            requests_fail_after(signal, transport, &elsewhere);
        }
    }
    elsewhere.umount();
    drop((other, other_watchdog));
}

#[test]
fn many_removals_do_not_hold_an_unmount_up() {
    let (bed, mount, watchdog) = mounted("defaults");
    let root = mount.root();
    make_tree(root, "src", "text");
    for at in 0..100 {
        mount.clone_path(&root.join("src"), &root.join(format!("c{at}")));
    }
    look_at_all(root);
    for at in 0..100 {
        mount.remove(&root.join(format!("c{at}")));
    }
    let began = Instant::now();
    mount.umount();
    drop(watchdog);
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    bed.fsck();
}

/// Makes trees of mode 0555 that belong to `nobody`, or to the user of this test.
fn make_closed_trees(root: &Path) {
    make_tree(root, "src", "new");
    make_tree(root, "dst", "old");
    let mode = |name: &str, mode| {
        fs::set_permissions(root.join(name), PermissionsExt::from_mode(mode)).unwrap();
    };
    mode("src", 0o555);
    mode("dst", 0o555);
    if is_root() {
        mode(".", 0o777);
        run_ok(
            "chown",
            &["-R".as_ref(), "nobody".as_ref(), root.as_os_str()],
        );
    }
}

#[test]
fn watchers_hear_of_a_tree_that_its_owner_may_not_write() {
    on_both_with_bed(|bed, mount| {
        let root = mount.root();
        make_closed_trees(root);
        look_at_all(root);
        let command = bed.command_for_others();
        let [src, dst, new] = ["src", "dst", "new"].map(|name| root.join(name));
        let owner = OTHER.to_string();
        let run = |args: &[&OsStr]| {
            let ids = ["--reuid", &owner, "--regid", &owner, "--clear-groups"].map(OsStr::new);
            let command = [command.as_os_str()];
            match is_root() {
                true => run_ok("setpriv", &[&ids[..], &command, args].concat()),
                false => run_ok(command[0], args),
            };
        };
        let mut watcher = Watcher::of(root, &[".", "dst", "dst/a"]);
        run(&["clone".as_ref(), src.as_ref(), new.as_ref()]);
        watcher.hears(&[".:MOVED_TO:new"]);
        run(&[
            "clone".as_ref(),
            "--replace".as_ref(),
            src.as_ref(),
            dst.as_ref(),
        ]);
        watcher.hears(&["dst:MOVE_SELF:", "dst/a:DELETE_SELF:", "dst:DELETE_SELF:"]);
        watcher.hears(&[".:MOVED_FROM:dst", ".:MOVED_TO:dst"]);
        assert_eq!(fs::read_to_string(dst.join("a/b/f")).unwrap(), "new");
        for tree in [&src, &dst, &new] {
            assert_eq!(fs::metadata(tree).unwrap().mode(), 0o40_555);
        }
        let mut watcher = Watcher::of(root, &[".", "new", "new/a"]);
        run(&["rm".as_ref(), new.as_ref()]);
        watcher.hears(&["new:MOVE_SELF:", "new/a:DELETE_SELF:", "new:DELETE_SELF:"]);
        watcher.hears(&[".:MOVED_FROM:new"]);
        assert!(!new.exists());
    });
}

#[test]
fn a_tree_that_its_owner_may_not_write_is_open_to_the_change_alone() {
    if !is_root() {
        println!("not root: the mount of an ordinary user is one with its owner");
        return;
    }
    on_both(|mount| {
        let root = mount.root();
        make_closed_trees(root);
        let dir = File::open(root).unwrap();
        let may_write = || {
            let flags = AtFlags::EACCESS;
            let access = rustix::fs::accessat(&dir, "dst", Access::WRITE_OK, flags);
            let mode = fs::metadata(root.join("dst")).unwrap().mode();
            // Its mode is told as it is.
            assert_eq!(mode, 0o40_555);
            access == Ok(())
        };
        let as_user = |user: u32, may: bool| {
            std::thread::scope(|scope| {
                let look = || {
                    let user = rustix::thread::Uid::from_raw(user);
                    rustix::thread::set_thread_uid(user).unwrap();
                    may_write()
                };
                let found = scope.spawn(look).join().unwrap();
                assert_eq!(found, may, "user {user}");
            });
        };
        let stages = || {
            let user = rustix::thread::Uid::from_raw(OTHER);
            rustix::thread::set_thread_uid(user).unwrap();
            assert!(!may_write(), "before");
            let name = b"dst".to_vec();
            let staged = Staged::try_with(&dir, &StageRequest::Remove { name }).unwrap();
            assert!(!may_write(), "staged");
            let held = staged.open().unwrap();
            assert!(may_write(), "the change");
            as_user(OTHER, false);
            assert!(may_write(), "still the change");
            let none = RenameFlags::NOREPLACE;
            let elsewhere = rustix::fs::renameat_with(&dir, "dst", &held, "elsewhere", none);
            assert!(elsewhere.is_err(), "another change");
            drop(held);
            soon("the change ends", || !may_write());
        };
        std::thread::scope(|scope| scope.spawn(stages).join().unwrap());
        // A change of a user that does not own the tree.
        let stages = || {
            let user = rustix::thread::Uid::from_raw(OTHER - 1);
            rustix::thread::set_thread_uid(user).unwrap();
            let name = b"dst".to_vec();
            let staged = Staged::try_with(&dir, &StageRequest::Remove { name }).unwrap();
            let held = staged.open().unwrap();
            assert!(!may_write(), "no owner");
            let none = RenameFlags::NOREPLACE;
            let removed = rustix::fs::renameat_with(&dir, "dst", &held, STAGED_NAME, none);
            assert_eq!(removed, Err(Errno::ACCESS));
        };
        std::thread::scope(|scope| scope.spawn(stages).join().unwrap());
        assert!(root.join("dst/a/b/f").exists());
    });
}
