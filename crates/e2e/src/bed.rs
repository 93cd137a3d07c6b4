//! A volume and its mount in a temporary folder, undone in every case.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::channel;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::mount::UnmountFlags;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd};
use serde_json::Value;
use tempfile::TempDir;

/// How long a daemon may take to end after it was told to.
const EXIT_PATIENCE: Duration = Duration::from_secs(60);
/// How long a daemon may take to end that was killed. Its mount is ended by force then, since a
/// thread of it may wait in the kernel for a program that waits for the daemon.
const KILL_PATIENCE: Duration = Duration::from_secs(5);
/// How long a program may take.
const RUN_PATIENCE: Duration = Duration::from_secs(20 * 60);
/// Mounts of this process, by the process ids of their daemons.
static MOUNTS: Mutex<Vec<(Pid, PathBuf)>> = Mutex::new(Vec::new());

/// The command under test: `RAMET_BIN`, or a release build of this workspace. `ramet-bench` lies
/// beside it.
pub fn ramet_bin() -> &'static Path {
    static BIN: OnceLock<PathBuf> = OnceLock::new();
    BIN.get_or_init(|| {
        if let Some(path) = std::env::var_os("RAMET_BIN") {
            return path.into();
        }
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let out = Command::new(cargo)
            .args(["build", "--release", "--quiet"])
            .args(["-p", "rametfs", "-p", "ramet-bench"])
            .args(["--message-format", "json"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .stderr(Stdio::inherit())
            .output()
            .expect("cargo runs");
        assert!(out.status.success(), "ramet does not build");
        String::from_utf8_lossy(&out.stdout)
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .filter_map(|message| message["executable"].as_str().map(PathBuf::from))
            .find(|program| program.ends_with("ramet"))
            .expect("cargo names the executable it built")
    })
}

/// Runs a program to its end and returns its output.
///
/// # Panics
/// If it does not end in time. A program that waits in the kernel stays then.
pub fn run<S: AsRef<OsStr>>(program: impl AsRef<OsStr>, args: &[S]) -> Output {
    run_within(Path::new(program.as_ref()), args, RUN_PATIENCE).expect("the program ends in time")
}

/// The same; `None` if it does not end within `limit`.
fn run_within<S: AsRef<OsStr>>(program: &Path, args: &[S], limit: Duration) -> Option<Output> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null());
    let (stdout, stderr) = (Stdio::piped(), Stdio::piped());
    let child = command.stdout(stdout).stderr(stderr).spawn();
    let child = child.unwrap_or_else(|e| {
        panic!(
            "{}: {e} (./test installs what is missing)",
            program.display()
        )
    });
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let (sender, ended) = channel();
    // Nobody waits for the thread where the program does not end.
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    match ended.recv_timeout(limit) {
        Ok(output) => Some(output.expect("the output of a child can be read")),
        Err(_) => {
            println!("{} does not end", program.display());
            let _ = pid.map(|pid| rustix::process::kill_process(pid, Signal::KILL));
            None
        }
    }
}

/// Ends a mount whose daemon may wait for itself: all requests fail, and it is unmounted.
pub fn force_unmount(dir: &Path) {
    let flags = UnmountFlags::FORCE | UnmountFlags::DETACH;
    if rustix::mount::unmount(dir, flags).is_err() {
        // Only root may call umount(2).
        let args = ["-uz".as_ref(), dir];
        let _ = run_within("fusermount3".as_ref(), &args, EXIT_PATIENCE);
    }
}

/// Runs a program that must succeed; returns its standard output.
pub fn run_ok<S: AsRef<OsStr>>(program: impl AsRef<OsStr>, args: &[S]) -> String {
    let shown: Vec<_> = args.iter().map(|a| a.as_ref().to_string_lossy()).collect();
    let shown = format!("{} {}", program.as_ref().display(), shown.join(" "));
    let out = run(program, args);
    assert!(
        out.status.success(),
        "{shown}\n{}\n{}{}",
        out.status,
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// Runs the command, which must succeed; returns its standard output.
pub fn done(args: &[&str]) -> String {
    run_ok(ramet_bin(), args)
}

/// Runs the command, which must fail; returns its standard error.
///
/// # Panics
/// If it succeeds.
pub fn refused(args: &[&str]) -> String {
    let out = run(ramet_bin(), args);
    assert!(!out.status.success(), "{args:?} is not refused");
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// How long daemon, kernel and watcher may take for steps of their own.
const STEP_PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `is_so`, for so long that it counts as never.
///
/// # Panics
/// If it is not so then, with the text `why`.
pub fn until(why: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < STEP_PATIENCE, "not in time: {why}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The text of a path.
///
/// # Panics
/// If it is not UTF-8. Paths of tests are.
pub fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

/// A temporary folder with a volume image and an empty mount point.
pub struct Bed {
    dir: TempDir,
}

impl Bed {
    /// Makes the folder and a volume of `size` (as `mkfs --size` takes it) in it.
    ///
    /// The folder is in `RAMET_E2E_DIR`, or in the system's folder for temporary files; it must be
    /// on a file system with holes and extended attributes.
    pub fn new(size: &str) -> Bed {
        let bed = Bed::without_volume();
        run_ok(
            ramet_bin(),
            &[
                "mkfs",
                "--size",
                size,
                bed.volume().to_str().expect("temporary paths are UTF-8"),
            ],
        );
        bed
    }

    /// A copy of the command under test in the folder, both of which any user may reach: the
    /// build's folder may be closed to others.
    pub fn command_for_others(&self) -> PathBuf {
        let bin = self.path().join("ramet");
        // A process of its own writes the file. A child that another thread starts meanwhile would
        // inherit the open file, and a file that is open for writing cannot be run.
        run_ok("cp", &[ramet_bin().as_os_str(), bin.as_os_str()]);
        for path in [self.path(), &bin] {
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).expect("ours");
        }
        bin
    }

    /// The folder and the mount point, without a volume.
    pub fn without_volume() -> Bed {
        assert!(
            Path::new("/dev/fuse").exists(),
            "end-to-end tests need /dev/fuse (modprobe fuse)"
        );
        let parent =
            std::env::var_os("RAMET_E2E_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
        let dir = tempfile::Builder::new()
            .prefix("ramet-e2e-")
            .tempdir_in(parent)
            .expect("a temporary folder can be made");
        std::fs::create_dir(dir.path().join("mnt")).expect("the folder is new");
        Bed { dir }
    }

    /// Another one, with a copy of the (unmounted) volume.
    pub fn copied(&self) -> Bed {
        let other = Bed::without_volume();
        let volumes = [self.volume(), other.volume()];
        run_ok("cp", &[&["--sparse=always".into()], &volumes[..]].concat());
        other
    }

    /// The folder itself, for files that belong beside the volume.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Where the volume image is.
    pub fn volume(&self) -> PathBuf {
        self.dir.path().join("volume.ramet")
    }

    /// Where it is mounted.
    pub fn mount_point(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    /// A bed without a volume that belongs to the user `uid`, and the command for that user.
    pub fn of_user(uid: u32) -> (Bed, PathBuf) {
        let bed = Bed::without_volume();
        bed.hand_to(uid, uid);
        let command = bed.command_for_others();
        (bed, command)
    }

    /// Gives the folder and the mount point to `uid`, within reach of every user.
    pub fn hand_to(&self, uid: u32, gid: u32) {
        std::fs::set_permissions(self.path(), PermissionsExt::from_mode(0o755)).expect("ours");
        for path in [self.path(), &self.mount_point()] {
            std::os::unix::fs::chown(path, Some(uid), Some(gid)).expect("tests run as root");
        }
    }

    /// Mounts the volume with further `ramet mount` arguments.
    pub fn mount(&self, args: &[&str]) -> Mount {
        let (volume, dir) = (self.volume(), self.mount_point());
        let log = self.dir.path().join("daemon.log");
        let mut all: Vec<&OsStr> = vec!["mount".as_ref(), volume.as_ref(), dir.as_ref()];
        all.extend(["--log".as_ref(), log.as_os_str()]);
        all.extend(args.iter().map(OsStr::new));
        run_ok(ramet_bin(), &all);
        self.mounted()
    }

    /// The same, with a file of the permissions `mode`, a directory and a link in it, of which there
    /// is the snapshot `one`.
    pub fn mount_with_snapshot(&self, options: &str, mode: u32) -> Mount {
        let mount = self.mount(&["-o", options]);
        let at = |name: &str| mount.root().join(name);
        let file = at("file");
        std::fs::write(&file, "before").expect("there is room");
        std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).expect("it is ours");
        std::fs::create_dir(at("dir")).expect("there is room");
        std::os::unix::fs::symlink("file", at("link")).expect("there is room");
        run_ok("setfattr", &["-n", "user.old", "-v", "x", text(&file)]);
        done(&["snapshot", "create", text(mount.root()), "one"]);
        mount
    }

    /// Runs a shell script as the user `uid` in the folder, until a command of it fails. In it
    /// `refused COMMAND...` ends it where the command succeeds. Returns the lines that it wrote, but
    /// for those that name Ramet, and all of its output. A mount that it leaves behind is ended.
    pub fn script_of(&self, uid: u32, script: &str) -> (Vec<String>, String) {
        let refused =
            "refused() { if \"$@\" 2>/dev/null; then echo \"not refused: $*\"; exit 1; fi; }";
        let script =
            format!("set -e; unset XDG_RUNTIME_DIR; export TMPDIR=$PWD\n{refused}\n{script}");
        let ids = [format!("--reuid={uid}"), format!("--regid={uid}")];
        let out = Command::new("setpriv")
            .args(ids)
            .args(["--clear-groups", "timeout", "120", "sh", "-c", &script])
            .current_dir(self.path())
            .stdin(Stdio::null())
            .output()
            .expect("it is there");
        if is_mount_point(&self.mount_point()) {
            force_unmount(&self.mount_point());
        }
        let said = String::from_utf8_lossy(&out.stdout);
        let lines = said.lines().filter(|line| !line.contains("ramet"));
        let lines = lines.map(str::to_owned).collect();
        let all = format!("{said}{}", String::from_utf8_lossy(&out.stderr));
        (lines, all)
    }

    /// The volume that a test has mounted by a command of its own.
    pub fn mounted(&self) -> Mount {
        let dir = self.mount_point();
        let stat: Value = serde_json::from_str(&ramet_stat(&dir)).expect("stat --json is JSON");
        let pid = stat["pid"].as_i64().expect("stat tells the daemon's pid");
        let pid = Pid::from_raw(pid.try_into().expect("a pid")).expect("not zero");
        let mut mounts = MOUNTS.lock().expect("no holder panics");
        mounts.retain(|(other, _)| *other != pid);
        mounts.push((pid, dir.clone()));
        drop(mounts);
        Mount {
            dir,
            pid,
            process: rustix::process::pidfd_open(pid, PidfdFlags::empty()).expect("it runs"),
            gone: false,
        }
    }

    /// Asserts that `ramet fsck --files` finds the (unmounted) volume clean.
    pub fn fsck(&self) {
        self.fsck_with(&["--files"]);
    }

    /// The same without a look at each file of each clone.
    pub fn fsck_nodes(&self) {
        self.fsck_with(&[]);
    }

    fn fsck_with(&self, options: &[&str]) {
        let volume = self.volume();
        let mut args = vec![OsStr::new("fsck")];
        args.extend(options.iter().map(OsStr::new));
        args.push(volume.as_ref());
        run_ok(ramet_bin(), &args);
    }
}

fn ramet_stat(dir: &Path) -> String {
    run_ok(
        ramet_bin(),
        &[OsStr::new("stat"), "--json".as_ref(), dir.as_ref()],
    )
}

/// A mounted volume. Dropping it ends the daemon and the mount in every case.
pub struct Mount {
    dir: PathBuf,
    pid: Pid,
    process: OwnedFd,
    gone: bool,
}

impl Mount {
    /// The root of the mount.
    pub fn root(&self) -> &Path {
        &self.dir
    }

    /// The daemon's process id.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// The answer of `ramet stat --json`.
    pub fn stat(&self) -> Value {
        serde_json::from_str(&ramet_stat(&self.dir)).expect("stat --json is JSON")
    }

    /// Bytes of the volume in use, after everything so far is on it and a checkpoint is made.
    pub fn allocated_settled(&self) -> u64 {
        run_ok(
            ramet_bin(),
            &[
                OsStr::new("sync"),
                "--checkpoint".as_ref(),
                self.dir.as_ref(),
            ],
        );
        self.stat()["allocated_bytes"]
            .as_u64()
            .expect("a counter of stat")
    }

    /// Clones by the command.
    pub fn clone_path(&self, src: &Path, dst: &Path) {
        run_ok(
            ramet_bin(),
            &[OsStr::new("clone"), src.as_ref(), dst.as_ref()],
        );
    }

    /// Clones by the command to a path where something is, which is replaced.
    pub fn replace_path(&self, src: &Path, dst: &Path) {
        let args = ["clone".as_ref(), "--replace".as_ref(), src, dst];
        run_ok(ramet_bin(), &args);
    }

    /// Removes a whole tree by the command.
    pub fn remove(&self, path: &Path) {
        run_ok(ramet_bin(), &[OsStr::new("rm"), path.as_ref()]);
    }

    /// The daemon's memory in bytes by `key` of /proc/PID/status (`VmHWM`, `VmRSS`, `RssAnon`).
    pub fn memory(&self, key: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid.as_raw_pid()))
            .expect("the daemon runs");
        let line = status
            .lines()
            .find_map(|l| l.strip_prefix(key).and_then(|l| l.strip_prefix(':')))
            .unwrap_or_else(|| panic!("no {key} in /proc/PID/status"));
        let kib: u64 = line
            .trim()
            .trim_end_matches(" kB")
            .parse()
            .expect("a number of kB");
        kib * 1024
    }

    /// Processor time of the daemon so far, its own and that of its calls of the kernel.
    pub fn computed(&self) -> Duration {
        let pid = self.pid.as_raw_pid();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the daemon runs");
        let (_, fields) = stat.rsplit_once(") ").expect("its name is in brackets");
        let ticks = |at: usize| -> u64 {
            let field = fields.split(' ').nth(at).expect("fields as in proc(5)");
            field.parse().expect("clock ticks")
        };
        let ticks_per_sec = rustix::param::clock_ticks_per_second();
        // Fields 14 and 15 of the line, of which two are cut.
        Duration::from_millis((ticks(11) + ticks(12)) * 1000 / ticks_per_sec)
    }

    /// Unmounts by the command, which must leave no daemon behind.
    pub fn umount(self) {
        run_ok(ramet_bin(), &[OsStr::new("umount"), self.dir.as_ref()]);
        self.is_unmounted();
    }

    /// The same when a test has run the command itself.
    pub fn is_unmounted(mut self) {
        self.gone = true;
        assert!(
            ends_within(&self.process, Duration::ZERO),
            "ramet umount returned before the daemon ended"
        );
    }

    /// Kills the daemon as a crash would and leaves its dead mount in place.
    pub fn kill_daemon(&self) {
        kill_and_wait(self.pid);
    }

    /// Asks the daemon to end, as a machine that shuts down does, and waits for it.
    pub fn terminate(mut self) {
        rustix::process::kill_process(self.pid, Signal::TERM).expect("it is ours");
        assert!(
            ends_within(&self.process, EXIT_PATIENCE),
            "SIGTERM does not end the daemon"
        );
        self.gone = true;
    }

    /// Removes the dead mount by the command, if it was not ended by force.
    pub fn detach_dead(mut self) {
        if is_mount_point(&self.dir) {
            run_ok(ramet_bin(), &[OsStr::new("umount"), self.dir.as_ref()]);
        }
        self.gone = true;
    }
}

/// Whether something is mounted at `dir`, which is absolute.
pub fn is_mount_point(dir: &Path) -> bool {
    let mounts = std::fs::read("/proc/self/mounts").expect("there is /proc");
    let mut mounts = mounts.split(|&b| b == b'\n');
    mounts.any(|mount| mount.split(|&b| b == b' ').nth(1) == Some(dir.as_os_str().as_bytes()))
}

/// Kills a process that need not be a child, and waits for its end.
///
/// # Panics
/// If it does not end.
pub fn kill_and_wait(pid: Pid) {
    let fd = rustix::process::pidfd_open(pid, PidfdFlags::empty());
    // Already gone is as good.
    let _ = rustix::process::kill_process(pid, Signal::KILL);
    let Ok(fd) = fd else { return };
    if ends_within(&fd, KILL_PATIENCE) {
        return;
    }
    println!("a killed daemon waits in the kernel: its mount is ended by force");
    let mounts = MOUNTS.lock().expect("no holder panics");
    let dirs = mounts.iter().filter(|(daemon, _)| *daemon == pid);
    dirs.for_each(|(_, dir)| force_unmount(dir));
    drop(mounts);
    assert!(
        ends_within(&fd, EXIT_PATIENCE),
        "SIGKILL does not end the daemon"
    );
}

/// The descriptors of a daemon's connections, as a thread of it keeps them that waits in the kernel.
///
/// # Panics
/// If the daemon does not run, or this process may not look into it.
pub fn connections_of(daemon: Pid) -> Vec<OwnedFd> {
    taken_from(daemon, |file| file == Path::new("/dev/fuse"))
}

/// All descriptors of a daemon.
///
/// # Panics
/// If the daemon does not run, or this process may not look into it.
pub fn descriptors_of(daemon: Pid) -> Vec<OwnedFd> {
    taken_from(daemon, |_| true)
}

fn taken_from(process: Pid, is_wanted: impl Fn(&Path) -> bool) -> Vec<OwnedFd> {
    let opened = rustix::process::pidfd_open(process, PidfdFlags::empty()).expect("it runs");
    let fds = std::fs::read_dir(format!("/proc/{}/fd", process.as_raw_pid())).expect("it runs");
    let is_wanted = |fd: &std::fs::DirEntry| {
        let target = std::fs::read_link(fd.path()).unwrap_or_default();
        is_wanted(&target)
    };
    let number = |fd: std::fs::DirEntry| fd.file_name().to_str()?.parse().ok();
    let numbers = fds.flatten().filter(is_wanted).filter_map(number);
    let taken = numbers.map(|fd| pidfd_getfd(&opened, fd, PidfdGetfdFlags::empty()));
    taken.collect::<Result<_, _>>().expect("it keeps them open")
}

/// The processes that the first thread of a process has started and that it has not waited for.
/// There are none of one that has ended.
pub fn children_of(process: Pid) -> Vec<Pid> {
    let number = process.as_raw_pid();
    let path = format!("/proc/{number}/task/{number}/children");
    let children = std::fs::read_to_string(path).unwrap_or_default();
    let numbers = children.split_whitespace();
    let numbers = numbers.map(|number| number.parse().expect("the kernel tells numbers"));
    numbers.filter_map(Pid::from_raw).collect()
}

/// Whether a process ends within `limit` (a zombie has ended).
fn ends_within(process: &OwnedFd, limit: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let limit = Timespec {
        tv_sec: limit.as_secs() as i64,
        tv_nsec: 0,
    };
    matches!(
        poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&limit)),
        Ok(1)
    )
}

impl Drop for Bed {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Ok(log) = std::fs::read_to_string(self.path().join("daemon.log"))
        {
            println!("the daemon said:\n{log}");
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        let args = [OsStr::new("umount"), self.dir.as_ref()];
        let done = run_within(ramet_bin(), &args, EXIT_PATIENCE);
        if !done.is_some_and(|done| done.status.success()) {
            // Best effort in a test that already failed: no daemon and no mount may stay.
            force_unmount(&self.dir);
            let _ = rustix::process::kill_process(self.pid, Signal::KILL);
        }
    }
}
