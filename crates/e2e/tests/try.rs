//! `ramet try` and `ramet enter`: commands in forks that stand at the path of their source, as root
//! and as an ordinary user.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ramet_e2e::{Bed, Mount, run, run_ok, text};
use rustix::process::{Pid, Signal, geteuid, kill_process};

/// An ordinary user without a name.
const USER: u32 = 1234;
/// `nobody`: fusermount3 asks for the name of a user that mounts.
const OTHER: u32 = 65534;
/// The longest wait for a state that a test waits for.
const PATIENCE: Duration = Duration::from_secs(30);
/// The longest life of a command, in seconds.
const LIFE: &str = "60";

/// A mount of root that a user works on.
struct Desk {
    /// Before the folder, which it must leave first.
    mount: Mount,
    bed: Bed,
    bin: PathBuf,
    uid: u32,
}

/// Root and, if this is root, an ordinary user.
fn users() -> Vec<u32> {
    match geteuid().is_root() {
        true => vec![0, USER],
        false => vec![geteuid().as_raw()],
    }
}

fn said(out: &Output) -> String {
    let both = [&out.stdout[..], &out.stderr].concat();
    String::from_utf8_lossy(&both).into_owned()
}

impl Desk {
    fn new(uid: u32) -> Desk {
        let bed = Bed::new("256M");
        let bin = bed.command_for_others();
        let mount = bed.mount(&[]);
        if geteuid().is_root() {
            fs::set_permissions(mount.root(), fs::Permissions::from_mode(0o1777)).expect("ours");
        }
        let desk = Desk {
            mount,
            bed,
            bin,
            uid,
        };
        let project = desk.at("project");
        let script =
            "mkdir -p $1/sub && cd $1 && echo first > file && echo two > sub/two && echo x > gone";
        desk.must("sh", &["-c", script, "sh", &project]);
        desk
    }

    /// A path on the mount.
    fn at(&self, name: &str) -> String {
        text(&self.mount.root().join(name)).to_owned()
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.at(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    }

    fn exists(&self, name: &str) -> bool {
        Path::new(&self.at(name)).exists()
    }

    /// Arguments of setpriv(1) and timeout(1) before a program of the user.
    fn prefix(&self) -> Vec<String> {
        let mut all = Vec::new();
        if geteuid().is_root() && self.uid != 0 {
            let ids = [format!("--reuid={USER}"), format!("--regid={USER}")];
            all.extend(["setpriv".to_owned()].into_iter().chain(ids));
            all.push("--clear-groups".to_owned());
        }
        all.extend(["timeout", "--foreground", "-k", "5", LIFE].map(str::to_owned));
        all
    }

    fn as_user(&self, program: &str, args: &[&str]) -> Output {
        let prefix = self.prefix();
        let prefix: Vec<&str> = prefix.iter().map(String::as_str).collect();
        run(prefix[0], &[&prefix[1..], &[program], args].concat())
    }

    fn ramet(&self, args: &[&str]) -> Output {
        self.as_user(text(&self.bin), args)
    }

    fn must(&self, program: &str, args: &[&str]) -> String {
        let out = self.as_user(program, args);
        assert!(out.status.success(), "{program} {args:?}: {}", said(&out));
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    fn done(&self, args: &[&str]) -> String {
        self.must(text(&self.bin), args)
    }

    /// Starts a try of the project with a script, which gets the path of a file that ends it.
    fn start(&self, options: &[&str], script: &str) -> Busy {
        let prefix = self.prefix();
        // Without timeout(1): the signals of a test go to the command itself.
        let prefix = &prefix[..prefix.len() - 5];
        let project = self.at("project");
        let end = text(&self.bed.path().join("end")).to_owned();
        let bin = text(&self.bin).to_owned();
        let mut all: Vec<&str> = prefix.iter().map(String::as_str).collect();
        all.extend([&bin[..], "try"].iter().chain(options));
        all.extend([&project, "--", "sh", "-c", script, "sh", &end]);
        let mut command = Command::new(all[0]);
        command.args(&all[1..]).stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        Busy(command.spawn().expect("it starts"))
    }

    fn end(self) {
        self.mount.umount();
        self.bed.fsck();
    }
}

/// A child that ends with the test.
struct Busy(Child);

impl Busy {
    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Its exit status, within the patience.
    fn status(&mut self) -> Option<i32> {
        let mut status = None;
        wait_until("a command ends", || {
            status = self.0.try_wait().expect("it is a child");
            status.is_some()
        });
        status.and_then(|status| status.code())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_until(state: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "not within the patience: {state}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A script that tells that it began by a file, and goes on until another one is there.
const WAITS: &str = "echo inside > file; echo $PWD > began; n=0
    until [ -e \"$1\" ] || [ $n -ge 300 ]; do sleep 0.1; n=$((n + 1)); done";

#[test]
fn the_fork_stands_at_the_path_of_its_source() {
    for uid in users() {
        let desk = Desk::new(uid);
        let project = desk.at("project");
        let script = format!(
            "pwd; cat {project}/file; echo other > {project}/file; rm gone; mkdir new; \
             echo $RAMET_FORK; stat -c %u .; echo $1"
        );
        let args = ["try", "--keep", &project, "--", "sh", "-c", &script, "sh"];
        let out = desk.ramet(&[&args[..], &["a b"]].concat());
        assert!(out.status.success(), "{}", said(&out));
        let fork = desk.at("project.try-1");
        let told = String::from_utf8_lossy(&out.stdout);
        assert_eq!(told, format!("{project}\nfirst\n{fork}\n{uid}\na b\n"));
        let told = String::from_utf8_lossy(&out.stderr);
        for line in [
            "content, metadata  file\n",
            "removed            gone\n",
            "added              new/\n",
        ] {
            assert!(told.contains(line), "{told}");
        }
        assert!(told.contains(&format!("ramet merge {fork}")), "{told}");
        assert_eq!(desk.read("project/file"), "first\n");
        assert!(desk.exists("project/gone") && !desk.exists("project/new"));
        assert_eq!(desk.read("project.try-1/file"), "other\n");
        // The working directory of the caller, if it lies in the source.
        let (bin, sub) = (text(&desk.bin), desk.at("project/sub"));
        let script =
            format!("cd {sub} && {bin} try --discard .. -- sh -c 'pwd; cat two; echo 3 > two'");
        assert_eq!(desk.must("sh", &["-c", &script]), format!("{sub}\ntwo\n"));
        assert_eq!(desk.read("project/sub/two"), "two\n");
        assert!(!desk.exists("project.try-2"), "discarded");
        let named = desk.at("named");
        desk.done(&[
            "try", "--keep", "--name", &named, "--note", "a note", &project, "--", "true",
        ]);
        let told = desk.done(&["forks", "-q", &named]);
        assert!(told.contains("\"a note\""), "{told}");
        // At its own path.
        let args = ["try", "--own-path", "--discard", &project, "--", "pwd"];
        assert_eq!(desk.done(&args), format!("{}\n", desk.at("project.try-2")));
        desk.end();
    }
}

#[test]
fn a_commit_takes_the_changes_and_no_more() {
    for uid in users() {
        let desk = Desk::new(uid);
        let project = desk.at("project");
        let script = "echo other > file; rm gone; echo new > sub/new";
        let out = desk.ramet(&["try", "--commit", &project, "--", "sh", "-c", script]);
        assert!(out.status.success(), "{}", said(&out));
        assert_eq!(desk.read("project/file"), "other\n");
        assert_eq!(desk.read("project/sub/new"), "new\n");
        assert_eq!(desk.read("project/sub/two"), "two\n");
        assert!(!desk.exists("project/gone") && !desk.exists("project.try-1"));
        // A failed command is not committed.
        let failed = "echo broken > file; exit 7";
        let out = desk.ramet(&["try", "--commit", &project, "--", "sh", "-c", failed]);
        assert_eq!(out.status.code(), Some(7), "{}", said(&out));
        assert!(
            said(&out).contains("nothing is committed"),
            "{}",
            said(&out)
        );
        assert_eq!(desk.read("project/file"), "other\n");
        assert_eq!(desk.read("project.try-1/file"), "broken\n");
        // Both sides changed a file in two ways: a conflict.
        let mut busy = desk.start(&["--commit"], WAITS);
        wait_until("it began", || desk.exists("project.try-2/began"));
        desk.must(
            "sh",
            &["-c", "echo outside > $1", "sh", &desk.at("project/file")],
        );
        fs::write(desk.bed.path().join("end"), "").expect("there is room");
        assert_eq!(busy.status(), Some(125));
        assert_eq!(desk.read("project/file"), "outside\n");
        assert_eq!(desk.read("project.try-2/file"), "inside\n");
        desk.end();
    }
}

#[test]
fn a_fork_with_other_attributes_of_its_top_is_kept() {
    const MARKS: &str = "import os; os.setxattr('.', 'user.a', b'b')";
    for uid in users() {
        let desk = Desk::new(uid);
        let project = desk.at("project");
        let commands: [&[&str]; 2] = [&["chmod", "700", "."], &["python3", "-c", MARKS]];
        for (number, command) in (1..).zip(commands) {
            let out = desk.ramet(&[&["try", "--commit", &project, "--"], command].concat());
            assert!(out.status.success(), "{}", said(&out));
            assert!(
                said(&out).contains("attributes of its top"),
                "{}",
                said(&out)
            );
            assert!(said(&out).contains("the fork is kept"), "{}", said(&out));
            assert!(desk.exists(&format!("project.try-{number}")));
        }
        // Changes of names in the top are no change of its attributes.
        let script = "echo new > new && rm gone && touch .";
        let out = desk.ramet(&["try", "--commit", &project, "--", "sh", "-c", script]);
        assert!(out.status.success(), "{}", said(&out));
        assert_eq!(desk.read("project/new"), "new\n");
        assert!(!desk.exists("project.try-3"), "{}", said(&out));
        desk.end();
    }
}

#[test]
fn ignored_directories_of_a_git_tree_are_taken_if_asked() {
    for uid in users() {
        let desk = Desk::new(uid);
        let project = desk.at("project");
        let git = "cd $1 && echo target > .gitignore && git init -q && git add . && \
                   git -c user.name=a -c user.email=a@b commit -qm first";
        desk.must("sh", &["-c", git, "sh", &project]);
        let build =
            "mkdir -p target && echo built > target/out && echo other > file && git status -s";
        let out = desk.ramet(&["try", "--commit", &project, "--", "sh", "-c", build]);
        assert!(out.status.success(), "{}", said(&out));
        assert_eq!(desk.read("project/file"), "other\n");
        assert!(!desk.exists("project/target"));
        assert!(
            desk.exists("project.try-1/target/out"),
            "nothing is lost: {}",
            said(&out)
        );
        let args = [
            "try",
            "--commit",
            "--ignored=take",
            &project,
            "--",
            "sh",
            "-c",
            build,
        ];
        let out = desk.ramet(&args);
        assert!(out.status.success(), "{}", said(&out));
        assert_eq!(desk.read("project/target/out"), "built\n");
        assert!(!desk.exists("project.try-2"), "{}", said(&out));
        desk.must("git", &["-C", &project, "fsck", "--strict"]);
        desk.end();
    }
}

#[test]
fn statuses_and_signals_are_passed_on() {
    for uid in users() {
        let desk = Desk::new(uid);
        let project = desk.at("project");
        for (script, status) in [
            ("exit 7", 7),
            ("kill -9 $$", 137),
            ("kill -TERM $$", 143),
            ("exit 255", 255),
        ] {
            let out = desk.ramet(&["try", "--discard", &project, "--", "sh", "-c", script]);
            assert_eq!(out.status.code(), Some(status), "{script}: {}", said(&out));
        }
        for (program, status) in [("/no/such/program", 127), ("/etc/passwd", 126)] {
            let out = desk.ramet(&["try", &project, "--", program]);
            assert_eq!(out.status.code(), Some(status), "{}", said(&out));
        }
        let out = desk.ramet(&["try", &desk.at("missing"), "--", "true"]);
        assert_eq!(out.status.code(), Some(125), "{}", said(&out));
        assert!(!desk.exists("project.try-1"), "nothing is left of them");
        let script = format!("trap 'echo told > told; exit 9' TERM; {WAITS}");
        let mut busy = desk.start(&[], &script);
        wait_until("it began", || desk.exists("project.try-1/began"));
        kill_process(busy.pid(), Signal::TERM).expect("it is ours");
        assert_eq!(busy.status(), Some(9));
        assert_eq!(desk.read("project.try-1/told"), "told\n");
        assert_eq!(desk.read("project/file"), "first\n");
        desk.end();
    }
}

#[test]
fn a_killed_try_leaves_a_fork_and_no_mount() {
    for uid in users() {
        let desk = Desk::new(uid);
        let project = desk.at("project");
        let mounts = || fs::read_to_string("/proc/self/mountinfo").expect("there is /proc");
        let count = |all: String| all.lines().filter(|line| line.contains(&project)).count();
        let mut busy = desk.start(&["--commit"], WAITS);
        wait_until("it began", || desk.exists("project.try-1/began"));
        assert_eq!(desk.read("project.try-1/began").trim(), project);
        assert_eq!(desk.read("project/file"), "first\n");
        assert_eq!(count(mounts()), 0, "the mount is seen outside");
        let used = desk.ramet(&["drop", &desk.at("project.try-1")]);
        assert!(said(&used).contains("in use by"), "{}", said(&used));
        kill_process(busy.pid(), Signal::KILL).expect("it is ours");
        assert_eq!(busy.status(), None, "a signal ended it");
        // The command goes on by itself.
        fs::write(desk.bed.path().join("end"), "").expect("there is room");
        let mut dropped = None;
        wait_until("the command ends", || {
            let out = desk.ramet(&["reset", &desk.at("project.try-1")]);
            dropped = Some(said(&out));
            out.status.success()
        });
        assert_eq!(desk.read("project.try-1/file"), "first\n", "{dropped:?}");
        assert_eq!(desk.read("project/file"), "first\n");
        desk.done(&["drop", &desk.at("project.try-1")]);
        assert_eq!(count(mounts()), 0);
        desk.end();
    }
}

#[test]
fn two_at_once_have_forks_of_their_own() {
    for uid in users() {
        let desk = Desk::new(uid);
        let script = format!("echo $RAMET_FORK > mine; {WAITS}; echo $RAMET_FORK >> mine");
        let mut all: Vec<Busy> = (0..2).map(|_| desk.start(&["--keep"], &script)).collect();
        for name in ["project.try-1", "project.try-2"] {
            wait_until("it began", || desk.exists(&format!("{name}/began")));
        }
        fs::write(desk.bed.path().join("end"), "").expect("there is room");
        for busy in &mut all {
            assert_eq!(busy.status(), Some(0));
        }
        for name in ["project.try-1", "project.try-2"] {
            let fork = desk.at(name);
            assert_eq!(
                desk.read(&format!("{name}/mine")),
                format!("{fork}\n{fork}\n")
            );
        }
        assert!(!desk.exists("project/mine"));
        desk.end();
    }
}

#[test]
fn a_system_without_namespaces_is_told() {
    for uid in users() {
        let desk = Desk::new(uid);
        let project = desk.at("project");
        // A user namespace in which no other one may be made, and no mount.
        let script = "echo 0 > /proc/sys/user/max_user_namespaces || exit 99
            exec setpriv --bounding-set=-sys_admin --inh-caps=-all \"$@\"";
        let bin = text(&desk.bin);
        let inside = ["-Ur", "sh", "-c", script, "sh", bin, "try", "--keep"];
        let forbidden = |args: &[&str]| desk.as_user("unshare", &[&inside[..], args].concat());
        let out = forbidden(&[&project, "--", "true"]);
        assert_eq!(out.status.code(), Some(125), "{}", said(&out));
        for words in ["max_user_namespaces", "--own-path"] {
            assert!(said(&out).contains(words), "{}", said(&out));
        }
        assert!(!desk.exists("project.try-1"), "nothing is left of it");
        let out = forbidden(&[
            "--own-path",
            &project,
            "--",
            "sh",
            "-c",
            "pwd; echo 1 > file",
        ]);
        assert!(out.status.success(), "{}", said(&out));
        let fork = desk.at("project.try-1");
        assert!(
            said(&out).starts_with(&format!("{fork}\n")),
            "{}",
            said(&out)
        );
        assert_eq!(desk.read("project/file"), "first\n");
        desk.end();
    }
}

/// Runs a try on a terminal, and answers a question there. The command says `ready` to have a line
/// typed that it does not read.
const ANSWERS: &str = r#"
import os, pty, select, sys, time
question, answer = sys.argv[1].encode(), sys.argv[2].encode()
ready = b"ready"
pid, terminal = pty.fork()
if pid == 0:
    os.execvp(sys.argv[3], sys.argv[3:])
said, end = b"", time.monotonic() + 50
try:
    while time.monotonic() < end:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        part = os.read(terminal, 4096)
        if not part:
            break
        said += part
        if ready in said:
            os.write(terminal, b"c\n")
            ready = b"\0"
        if question in said:
            os.write(terminal, answer)
            question = b"\0"
except OSError:
    pass
sys.stdout.write(said.decode(errors="replace"))
sys.stdout.flush()
if time.monotonic() >= end:
    os.kill(pid, 9)
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255)
"#;

#[test]
fn a_user_on_a_terminal_is_asked() {
    for uid in users() {
        let desk = Desk::new(uid);
        let project = desk.at("project");
        let bin = text(&desk.bin);
        let asked = |answer: &str, options: &[&str], script: &str| {
            // The terminal is one of the test's own user: others may not reach its Python.
            let prefix = desk.prefix();
            let head = ["-c", ANSWERS, "or discard?", answer];
            let prefix: Vec<&str> = prefix.iter().map(String::as_str).collect();
            let tail = [&project[..], "--", "sh", "-c", script];
            run(
                "python3",
                &[&head[..], &prefix, &[bin, "try"], options, &tail].concat(),
            )
        };
        let out = asked("d\n", &[], "echo one > file; exit 3");
        assert_eq!(out.status.code(), Some(3), "{}", said(&out));
        assert!(!desk.exists("project.try-1"), "{}", said(&out));
        assert_eq!(desk.read("project/file"), "first\n");
        let out = asked("?\nk\n", &[], "echo two > file");
        assert!(out.status.success(), "{}", said(&out));
        assert_eq!(desk.read("project.try-1/file"), "two\n");
        let out = asked(
            "c\n",
            &["--commit"],
            "test -t 0 && echo three > file; exit 4",
        );
        assert_eq!(out.status.code(), Some(4), "{}", said(&out));
        assert_eq!(desk.read("project/file"), "three\n");
        // A line that was typed before the question is no answer, and modes of the command are
        // none of the question: a carriage return ends the answer.
        let script = "echo four > file; stty raw -echo; echo ready; sleep 1";
        let out = asked("d\r", &[], script);
        assert!(out.status.success(), "{}", said(&out));
        assert!(!desk.exists("project.try-2"), "{}", said(&out));
        assert_eq!(desk.read("project/file"), "three\n", "{}", said(&out));
        let out = asked("k\n", &["--ask"], "true");
        assert!(said(&out).contains("nothing changed"), "{}", said(&out));
        assert!(!desk.exists("project.try-2"), "an equal fork goes");
        desk.end();
    }
}

/// Presses a key of the terminal while a try runs, and tells how often the command heard of it. The
/// try is stopped until the command has heard it once: two signals at once would be one.
const KEYS: &str = r#"
import os, pty, select, signal, sys, time
pid, terminal = pty.fork()
if pid == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
said, end, pressed = b"", time.monotonic() + 50, False
try:
    while time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            part = os.read(terminal, 4096)
            if not part:
                break
            said += part
            if b"ready" in said and not pressed:
                pressed = True
                os.kill(pid, signal.SIGSTOP)
                os.write(terminal, b"\x03")
            if b"once" in said:
                os.kill(pid, signal.SIGCONT)
except OSError:
    pass
if time.monotonic() >= end:
    os.kill(pid, 9)
sys.stdout.write(said.decode(errors="replace"))
sys.stdout.flush()
os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255)
"#;

/// Closes the terminal of a try, which leads its session, when the command is ready. Tells whether
/// the try ended in time, and its status.
const HANGUP: &str = r#"
import os, pty, select, signal, sys, time
pid, terminal = pty.fork()
if pid == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
said, end = b"", time.monotonic() + 30
while b"ready" not in said and time.monotonic() < end:
    if select.select([terminal], [], [], 1)[0]:
        said += os.read(terminal, 4096)
os.close(terminal)
while time.monotonic() < end:
    found, status = os.waitpid(pid, os.WNOHANG)
    if found:
        print("ended", os.waitstatus_to_exitcode(status))
        sys.exit(0)
    time.sleep(0.05)
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
print("late")
"#;

#[test]
fn a_key_of_the_terminal_reaches_the_command_once() {
    let desk = Desk::new(users()[0]);
    let project = desk.at("project");
    let script = "import signal, sys, time
count = 0
def heard(*_):
    global count
    count += 1
    print('once', flush=True)
signal.signal(signal.SIGINT, heard)
print('ready', flush=True)
end = time.monotonic() + 30
while count == 0 and time.monotonic() < end:
    time.sleep(0.05)
time.sleep(0.5)
print('heard', count, flush=True)
sys.exit(5)";
    let args = ["-c", KEYS, text(&desk.bin), "try", "--keep", &project];
    let args = [&args[..], &["--", "python3", "-c", script]].concat();
    let out = desk.as_user("python3", &args);
    assert!(said(&out).contains("heard 1"), "{}", said(&out));
    assert_eq!(out.status.code(), Some(5), "{}", said(&out));
    assert!(desk.exists("project.try-1"));
    desk.end();
}

#[test]
fn a_terminal_that_goes_ends_the_command_and_keeps_the_fork() {
    let desk = Desk::new(users()[0]);
    let project = desk.at("project");
    let tries = |before: &str| {
        let script = format!("{before} echo changed > file; echo ready; sleep 25 & wait $!");
        let args = ["-c", HANGUP, text(&desk.bin), "try", "--commit", &project];
        let args = [&args[..], &["--", "sh", "-c", &script]].concat();
        said(&desk.as_user("python3", &args))
    };
    let told = tries("trap 'echo gone > file; exit 3' HUP;");
    assert!(told.contains("ended 3"), "{told}");
    assert_eq!(desk.read("project.try-1/file"), "gone\n");
    let told = tries("");
    assert!(told.contains("ended 129"), "{told}");
    assert_eq!(desk.read("project.try-2/file"), "changed\n");
    assert_eq!(desk.read("project/file"), "first\n");
    desk.end();
}

#[test]
fn a_shell_enters_a_fork_at_the_path_of_its_source() {
    for uid in users() {
        let desk = Desk::new(uid);
        let (project, fork) = (desk.at("project"), desk.at("project-fork-1"));
        desk.done(&["fork", &project]);
        let out = desk.ramet(&[
            "enter",
            &fork,
            "--",
            "sh",
            "-c",
            "pwd; echo in > file; exit 6",
        ]);
        assert_eq!(out.status.code(), Some(6), "{}", said(&out));
        assert_eq!(String::from_utf8_lossy(&out.stdout), format!("{project}\n"));
        assert_eq!(desk.read("project/file"), "first\n");
        assert_eq!(desk.read("project-fork-1/file"), "in\n");
        let bin = text(&desk.bin);
        let shell = ["-c", "SHELL=/bin/pwd exec $1 enter $2", "sh", bin, &fork];
        assert_eq!(desk.must("sh", &shell), format!("{project}\n"));
        let out = desk.ramet(&["enter", &project]);
        assert_eq!(out.status.code(), Some(125), "{}", said(&out));
        assert!(said(&out).contains("is no fork"), "{}", said(&out));
        desk.must("rm", &["-r", &project]);
        let out = desk.ramet(&["enter", &fork, "--", "pwd"]);
        assert_eq!(String::from_utf8_lossy(&out.stdout), format!("{fork}\n"));
        assert!(said(&out).contains("gone"), "{}", said(&out));
        desk.end();
    }
}

#[test]
fn a_user_tries_on_a_mount_of_their_own() {
    if !geteuid().is_root() {
        println!("not root: every other test of this run is already one by an ordinary user");
        return;
    }
    let bed = Bed::without_volume();
    bed.hand_to(OTHER, OTHER);
    let bin = bed.command_for_others();
    let script = r#"set -e
        cd "$2"; ramet=$1
        $ramet mkfs --size 256M volume.ramet > /dev/null
        $ramet mount volume.ramet mnt
        trap '$ramet umount mnt' EXIT
        mkdir mnt/project; echo first > mnt/project/file
        $ramet try --keep mnt/project -- sh -c 'echo other > file; pwd'
        cat mnt/project/file mnt/project.try-1/file
        $ramet try --commit mnt/project -- sh -c 'echo third > file'
        cat mnt/project/file"#;
    let ids = [format!("--reuid={OTHER}"), format!("--regid={OTHER}")];
    let args = [
        &ids[0],
        &ids[1],
        "--clear-groups",
        "timeout",
        "-k",
        "5",
        LIFE,
    ];
    let args = [
        &args[..],
        &["sh", "-c", script, "sh", text(&bin), text(bed.path())],
    ]
    .concat();
    let told = run_ok("setpriv", &args);
    let project = bed.mount_point().join("project");
    let expected = format!("{}\nfirst\nother\nthird\n", text(&project));
    assert_eq!(told, expected);
}

#[test]
fn a_fork_that_is_used_or_that_was_told_to_end_is_not_committed() {
    for uid in users() {
        let desk = Desk::new(uid);
        let project = desk.at("project");
        let leaves = "sleep 6 > /dev/null 2>&1 & echo half > file";
        let out = desk.ramet(&["try", "--commit", &project, "--", "sh", "-c", leaves]);
        assert_eq!(out.status.code(), Some(125), "{}", said(&out));
        assert!(said(&out).contains("in use by"), "{}", said(&out));
        assert_eq!(desk.read("project/file"), "first\n");
        assert_eq!(desk.read("project.try-1/file"), "half\n");
        let args = [
            "try", "--commit", "--force", &project, "--", "sh", "-c", leaves,
        ];
        let out = desk.ramet(&args);
        assert!(out.status.success(), "{}", said(&out));
        assert_eq!(desk.read("project/file"), "half\n");
        assert!(!desk.exists("project.try-2"));
        // It ends tidily.
        let script = format!("trap 'echo late > file; exit 0' TERM; {WAITS}");
        let mut busy = desk.start(&["--commit"], &script);
        wait_until("it began", || desk.exists("project.try-2/began"));
        kill_process(busy.pid(), Signal::TERM).expect("it is ours");
        assert_eq!(busy.status(), Some(0));
        assert_eq!(desk.read("project/file"), "half\n");
        assert_eq!(desk.read("project.try-2/file"), "late\n");
        desk.end();
    }
}

#[test]
fn another_fork_at_the_path_of_the_first_one_is_left_alone() {
    for uid in users() {
        for option in ["--discard", "--commit"] {
            let desk = Desk::new(uid);
            let mut busy = desk.start(&[option], WAITS);
            wait_until("it began", || desk.exists("project.try-1/began"));
            desk.must("mv", &[&desk.at("project.try-1"), &desk.at("moved")]);
            desk.done(&["fork", &desk.at("project"), &desk.at("project.try-1")]);
            desk.must(
                "sh",
                &["-c", "echo mine > $1", "sh", &desk.at("project.try-1/file")],
            );
            fs::write(desk.bed.path().join("end"), "").expect("there is room");
            assert_eq!(busy.status(), Some(125), "{option}");
            assert_eq!(desk.read("project.try-1/file"), "mine\n");
            assert_eq!(desk.read("moved/file"), "inside\n");
            assert_eq!(desk.read("project/file"), "first\n");
            desk.end();
        }
    }
}

#[test]
fn a_source_that_moved_meanwhile_is_not_committed_to() {
    for uid in users() {
        let desk = Desk::new(uid);
        let mut busy = desk.start(&["--commit"], WAITS);
        wait_until("it began", || desk.exists("project.try-1/began"));
        desk.must("mv", &[&desk.at("project"), &desk.at("moved")]);
        desk.done(&["fork", &desk.at("moved"), &desk.at("project")]);
        fs::write(desk.bed.path().join("end"), "").expect("there is room");
        assert_eq!(busy.status(), Some(125));
        assert_eq!(desk.read("moved/file"), "first\n");
        assert_eq!(desk.read("project/file"), "first\n");
        assert_eq!(desk.read("project.try-1/file"), "inside\n");
        // By hand it comes to where the source is.
        desk.done(&["merge", &desk.at("project.try-1")]);
        assert_eq!(desk.read("moved/file"), "inside\n");
        desk.end();
    }
}

#[test]
fn a_fork_that_its_command_renames_is_told_under_its_new_name() {
    const RENAMES: &str =
        "echo inside > file; mkdir ../elsewhere && mv $RAMET_FORK ../elsewhere/it";
    for uid in users() {
        for (option, status) in [("--keep", 0), ("--discard", 125), ("--commit", 125)] {
            let desk = Desk::new(uid);
            let project = desk.at("project");
            let out = desk.ramet(&["try", option, &project, "--", "sh", "-c", RENAMES]);
            let told = said(&out);
            assert_eq!(out.status.code(), Some(status), "{option}: {told}");
            let fork = desk.at("elsewhere/it");
            let words = format!("'ramet merge {fork}' commits it, 'ramet drop {fork}'");
            assert!(told.contains(&words), "{option}: {told}");
            assert!(!told.contains("project.try-1"), "{option}: {told}");
            // The differences are told all the same.
            assert!(told.contains(" file\n"), "{option}: {told}");
            assert_eq!(desk.read("elsewhere/it/file"), "inside\n");
            assert_eq!(desk.read("project/file"), "first\n");
            desk.end();
        }
        let desk = Desk::new(uid);
        let project = desk.at("project");
        let removes = "cd / && rm -r $RAMET_FORK";
        let out = desk.ramet(&["try", "--keep", &project, "--", "sh", "-c", removes]);
        let told = said(&out);
        assert_eq!(out.status.code(), Some(125), "{told}");
        assert!(
            told.contains("project.try-1: the fork is there no more"),
            "{told}"
        );
        assert!(!told.contains("kept"), "{told}");
        desk.end();
    }
}

#[test]
fn an_equal_fork_that_is_used_stays_and_the_status_is_that_of_the_command() {
    let desk = Desk::new(users()[0]);
    let project = desk.at("project");
    let script = "setsid sleep 6 > /dev/null 2>&1 < /dev/null & sleep 0.2; exit 3";
    let prefix = desk.prefix();
    let mut args = vec!["-c", ANSWERS, "or discard?", "k\n"];
    args.extend(prefix.iter().map(String::as_str));
    args.extend([text(&desk.bin), "try", &project, "--", "sh", "-c", script]);
    let out = run("python3", &args);
    assert_eq!(out.status.code(), Some(3), "{}", said(&out));
    assert!(said(&out).contains("in use by"), "{}", said(&out));
    assert!(desk.exists("project.try-1"));
    desk.end();
}

/// Runs a try in the foreground, and puts itself there while the command goes on.
const TAKES_OVER: &str = r#"
import os, pty, signal, subprocess, sys, time
pid, terminal = pty.fork()
if pid:
    end = time.monotonic() + 50
    said = b""
    try:
        while time.monotonic() < end:
            said += os.read(terminal, 4096)
    except OSError:
        pass
    sys.stdout.write(said.decode(errors="replace"))
    sys.stdout.flush()
    os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
signal.alarm(40)
began, ends = sys.argv[1:3]
def in_front():
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
command = subprocess.Popen(sys.argv[3:], preexec_fn=in_front)
end = time.monotonic() + 20
while not os.path.exists(began) and time.monotonic() < end:
    time.sleep(0.05)
os.tcsetpgrp(0, os.getpgrp())
open(ends, "w").close()
command.wait(timeout=20)
print("mine" if os.tcgetpgrp(0) == os.getpgrp() else "taken", flush=True)
"#;

#[test]
fn a_try_in_the_background_leaves_the_terminal_alone() {
    let desk = Desk::new(users()[0]);
    let project = desk.at("project");
    let began = desk.at("project.try-1/began");
    let end = text(&desk.bed.path().join("end")).to_owned();
    let head = [
        "-c",
        TAKES_OVER,
        &began,
        &end,
        text(&desk.bin),
        "try",
        "--keep",
    ];
    let args = [&head[..], &[&project, "--", "sh", "-c", WAITS, "sh", &end]].concat();
    let out = run("python3", &args);
    assert!(said(&out).contains("mine"), "{}", said(&out));
    desk.end();
}
