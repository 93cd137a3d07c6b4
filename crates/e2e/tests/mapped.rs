//! A program stores through a mapping that stays open: `ramet sync` makes the stored pages durable,
//! and `ramet clone` copies them.
//!
//! `RAMET_ROUNDS` syncs (default 2), each followed by kill -9 of the daemon, and five times as many
//! clones, for each of four cases: root's mount and a user's, idle and beside 16 busy programs.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use ramet_e2e::{Bed, kill_and_wait, number};
use rustix::process::Pid;

/// `nobody`, which every Debian has.
const USER: u32 = 65534;
const PAGES: u64 = 256;
const BUSY_PROGRAMS: usize = 16;
const CLONES_PER_SYNC: u64 = 5;

/// Holds one mapping. Lines on its standard input: `map PATH PAGES`, `store TOKEN` into each page,
/// `missing PATH TOKEN`: how many pages of another file lack the token.
const WRITER: &str = r#"
import mmap, os, sys
for line in sys.stdin:
    verb, *words = line.split()
    answer = 0
    if verb == "map":
        file = os.open(words[0], os.O_RDWR | os.O_CREAT, 0o644)
        pages = range(0, int(words[1]) * 4096, 4096)
        os.ftruncate(file, pages.stop)
        stored = mmap.mmap(file, pages.stop)
    elif verb == "store":
        for page in pages:
            stored[page:page + 8] = words[0].encode().rjust(8)
    else:
        found = open(words[0], "rb").read()
        token = words[1].encode().rjust(8)
        answer = sum(found[page:page + 8] != token for page in range(0, int(words[2]) * 4096, 4096))
    print(answer, flush=True)
"#;

/// Writes, syncs, reads and removes files of its own until the mount is gone.
const BUSY: &str = r#"
import os, sys
path, part = sys.argv[1], os.urandom(65536)
try:
    for turn in range(1 << 40):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        for k in range(4):
            os.pwrite(file, part, k * 65536)
        if turn % 8 == 0:
            os.fsync(file)
        os.pread(file, 65536, 65536)
        os.close(file)
        os.unlink(path)
except OSError:
    pass
"#;

/// Runs commands as root or as a user, whose mount root may not look into.
struct Actor<'a> {
    bed: &'a Bed,
    bin: PathBuf,
    uid: u32,
}

impl Actor<'_> {
    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.bed.path());
        command.uid(self.uid).gid(self.uid);
        command
    }

    /// Runs `ramet` with these arguments, which must succeed; returns its output and its time.
    fn ramet(&self, args: &[&OsStr]) -> (String, Duration) {
        let begun = Instant::now();
        let out = self.command(&self.bin).args(args).output();
        let (out, took) = (out.expect("the command runs"), begun.elapsed());
        let text = String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned();
        assert!(out.status.success(), "ramet {args:?}: {text}");
        (text, took)
    }

    fn mount(&self) -> Mounted<'_> {
        let (volume, dir) = (self.bed.volume(), self.bed.mount_point());
        self.ramet(&["mount".as_ref(), volume.as_ref(), dir.as_ref()]);
        let (stat, _) = self.ramet(&["stat".as_ref(), "--json".as_ref(), dir.as_ref()]);
        let stat: serde_json::Value = serde_json::from_str(&stat).expect("stat --json is JSON");
        let pid = stat["pid"].as_i64().expect("stat tells the daemon's pid");
        let pid = Pid::from_raw(pid.try_into().expect("a pid")).expect("not zero");
        Mounted {
            actor: self,
            dir,
            pid,
        }
    }
}

/// A mount that ends with the value.
struct Mounted<'a> {
    actor: &'a Actor<'a>,
    dir: PathBuf,
    pid: Pid,
}

impl Mounted<'_> {
    fn sync(&self) -> Duration {
        self.actor.ramet(&["sync".as_ref(), self.dir.as_ref()]).1
    }

    fn writer(&self) -> Writer {
        let mut process = self.actor.command("python3");
        process.args(["-c", WRITER]);
        process.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = process.spawn().expect("./test installs python3");
        let orders = process.stdin.take().expect("piped");
        let answers = BufReader::new(process.stdout.take().expect("piped"));
        Writer {
            process: Ended(process),
            orders,
            answers,
        }
    }

    fn busy(&self, programs: usize) -> Vec<Ended> {
        let start = |k| {
            let mut program = self.actor.command("python3");
            program.args(["-c", BUSY]);
            program.arg(self.dir.join(format!("busy{k}")));
            Ended(program.spawn().expect("./test installs python3"))
        };
        (0..programs).map(start).collect()
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let mut umount = self.actor.command(&self.actor.bin);
        let umount = umount.arg("umount").arg(&self.dir).output();
        let umount = umount.expect("the command runs");
        let why = String::from_utf8_lossy(&umount.stderr);
        assert!(umount.status.success() || std::thread::panicking(), "{why}");
    }
}

/// A process that is killed with the value.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Writer {
    process: Ended,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Writer {
    fn order(&mut self, order: &str) -> u64 {
        writeln!(self.orders, "{order}").expect("the writer runs");
        let mut answer = String::new();
        let read = self.answers.read_line(&mut answer);
        read.expect("the writer runs");
        let answer = answer.trim().parse();
        answer.unwrap_or_else(|_| panic!("{order}: {:?}", self.process.0.try_wait()))
    }

    fn map(&mut self, file: &Path) {
        self.order(&format!("map {} {PAGES}", file.display()));
    }

    fn store(&mut self, token: u64) {
        self.order(&format!("store {token}"));
    }

    fn missing(&mut self, file: &Path, token: u64) -> u64 {
        self.order(&format!("missing {} {token} {PAGES}", file.display()))
    }
}

/// The findings of the rounds of one case.
#[derive(Default)]
struct Found {
    syncs: Vec<Duration>,
    missing_after_sync: u64,
    clones: u64,
    missing_in_clones: u64,
}

impl Found {
    fn tell(mut self, case: &str) {
        self.syncs.sort();
        let (median, worst) = (self.syncs[(self.syncs.len() - 1) / 2], self.syncs.last());
        println!(
            "{case}: {} syncs, then kill -9: {} pages missing; a sync took {median:?}, at most {:?}; \
             {} clones: {} pages missing",
            self.syncs.len(),
            self.missing_after_sync,
            worst.expect("a round"),
            self.clones,
            self.missing_in_clones
        );
        assert_eq!((self.missing_after_sync, self.missing_in_clones), (0, 0));
    }
}

/// The rounds of one case: each stores, clones, stores, syncs, kills the daemon and looks.
fn rounds(uid: u32, programs: usize) -> Found {
    let bed = Bed::without_volume();
    bed.hand_to(uid, uid);
    let bin = bed.command_for_others();
    let actor = Actor {
        bed: &bed,
        bin,
        uid,
    };
    let volume = bed.volume();
    let mkfs = ["mkfs", "--size", "2G"].map(OsStr::new);
    actor.ramet(&[&mkfs[..], &[volume.as_ref()]].concat());
    let mut found = Found::default();
    for round in 0..number("RAMET_ROUNDS", 2) {
        let mount = actor.mount();
        let dir = mount.dir.join(format!("d{round}"));
        let copy = mount.dir.join("copy");
        let file = dir.join("f");
        let made = actor.command("mkdir").arg(&dir).status();
        assert!(made.expect("mkdir runs").success());
        let busy = mount.busy(programs);
        let mut writer = mount.writer();
        writer.map(&file);
        for token in 1..=CLONES_PER_SYNC {
            writer.store(token);
            actor.ramet(&[
                "clone".as_ref(),
                "--replace".as_ref(),
                dir.as_ref(),
                copy.as_ref(),
            ]);
            found.clones += 1;
            found.missing_in_clones += writer.missing(&copy.join("f"), token);
        }
        let last = CLONES_PER_SYNC + 1;
        writer.store(last);
        found.syncs.push(mount.sync());
        kill_and_wait(mount.pid);
        drop((writer, busy, mount));
        let mount = actor.mount();
        found.missing_after_sync += mount.writer().missing(&file, last);
    }
    bed.fsck();
    found
}

#[test]
fn pages_stored_through_a_live_mapping_are_in_syncs_and_clones() {
    assert!(
        rustix::process::geteuid().is_root(),
        "the test makes mounts of two users"
    );
    for (owner, uid) in [("root", 0), ("a user", USER)] {
        for (load, programs) in [("idle", 0), ("16 busy programs", BUSY_PROGRAMS)] {
            rounds(uid, programs).tell(&format!("{owner}'s mount, {load}"));
        }
    }
}
