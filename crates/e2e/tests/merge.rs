//! `ramet merge` on mounts of both transports.
//!
//! Each wait has an end: descriptors of inotify are polled with a deadline, and a thread reads the
//! output of a shell.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use ramet_e2e::{Bed, Mount, done, ramet_bin, run, run_ok};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use serde_json::Value;

const TRANSPORTS: [&str; 2] = ["io_uring", "no_io_uring"];
/// The longest wait for something that comes at once.
const PATIENCE: Duration = Duration::from_secs(60);

fn status(args: &[&str]) -> (i32, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = run(ramet_bin(), args);
    let text = [stdout, stderr].concat();
    (
        status.code().unwrap(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

/// A directory `src` on a mount, with a fork `fork` once it is filled.
struct Pair<'a> {
    mount: &'a Mount,
}

impl Pair<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.mount.root().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn write(&self, name: &str, content: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    fn fork(&self) {
        done(&["fork", &self.text("src"), &self.text("fork")]);
    }

    /// Forks a repository with one commit, in which these names are ignored, and something is built.
    fn fork_repository(&self, ignored: &str) {
        self.write("src/.gitignore", ignored);
        self.write("src/tracked", "base\n");
        self.git("src", &["init", "-q", "-b", "main"]);
        self.git("src", &["add", "."]);
        self.git("src", &["commit", "-q", "-m", "first"]);
        self.write("src/target/built", "old");
        self.fork();
    }

    fn git(&self, dir: &str, args: &[&str]) -> String {
        let dir = self.text(dir);
        let fixed = ["-c", "user.name=a", "-c", "user.email=a@b", "-C", &dir];
        run_ok(Path::new("git"), &[&fixed[..], args].concat())
    }
}

/// A shell that works in a directory until it gets a line, and then runs a script.
struct Shell {
    child: Child,
    lines: Receiver<String>,
}

impl Shell {
    fn new(dir: &Path, script: &str) -> Shell {
        let script = format!("echo ready; read line; {script}");
        let mut child = Command::new("sh")
            .args(["-c", &script])
            .current_dir(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let shell = Shell { child, lines };
        assert_eq!(shell.line(), "ready");
        shell
    }

    fn line(&self) -> String {
        self.lines.recv_timeout(PATIENCE).unwrap()
    }

    fn go_on(&mut self) {
        self.child.stdin.take().unwrap().write_all(b"\n").unwrap();
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads the names of the events of a watch until one is of `name`.
fn hears_of(watch: &OwnedFd, name: &str) -> bool {
    let mut polled = [PollFd::new(watch, PollFlags::IN)];
    let limit = Timespec::try_from(PATIENCE).unwrap();
    while poll(&mut polled, Some(&limit)).unwrap() > 0 {
        let mut buffer = [MaybeUninit::uninit(); 4096];
        let mut reader = inotify::Reader::new(watch.as_fd(), &mut buffer);
        while let Ok(event) = reader.next() {
            if event
                .file_name()
                .is_some_and(|found| found.to_bytes() == name.as_bytes())
            {
                return true;
            }
            if reader.is_buffer_empty() {
                break;
            }
        }
    }
    false
}

#[test]
fn users_of_the_destination_stay_in_it() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = bed.mount(&["-o", transport]);
        let pair = Pair { mount: &mount };
        for name in ["changed", "kept", "removed", "sub/changed"] {
            pair.write(&format!("src/{name}"), "old");
        }
        pair.fork();
        pair.write("fork/changed", "new");
        pair.write("fork/sub/changed", "new");
        pair.write("fork/sub/added", "added");
        fs::remove_file(pair.path("fork/removed")).unwrap();
        let mut open = File::open(pair.path("src/changed")).unwrap();
        let kept = File::options()
            .write(true)
            .open(pair.path("src/kept"))
            .unwrap();
        let inode = fs::metadata(pair.path("src/kept")).unwrap().ino();
        let script = "cat added changed; echo; ls; echo made >made";
        let mut shell = Shell::new(&pair.path("src/sub"), script);
        let watch = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).unwrap();
        let flags = WatchFlags::CREATE | WatchFlags::MODIFY;
        inotify::add_watch(&watch, pair.path("src/sub"), flags).unwrap();
        // The kernel knows that there is no such name.
        assert!(!pair.path("src/sub/added").exists());
        let told = done(&["merge", &pair.text("fork")]);
        let wanted = "taken      changed\nremoved    removed\ntaken      sub/added\n\
                      taken      sub/changed\n";
        assert_eq!(told, wanted);
        assert_eq!(pair.read("src/changed"), "new");
        assert_eq!(pair.read("src/sub/added"), "added");
        assert!(!pair.path("src/removed").exists());
        let mut old = String::new();
        open.seek(SeekFrom::Start(0)).unwrap();
        open.read_to_string(&mut old).unwrap();
        assert_eq!(old, "old", "a descriptor goes on with the file that it has");
        kept.write_all_at(b"through", 0).unwrap();
        assert_eq!(pair.read("src/kept"), "through");
        assert_eq!(fs::metadata(pair.path("src/kept")).unwrap().ino(), inode);
        shell.go_on();
        let lines: Vec<String> = (0..3).map(|_| shell.line()).collect();
        assert_eq!(lines, ["addednew", "added", "changed"]);
        assert!(
            hears_of(&watch, "made"),
            "the watch is in the directory that has the name"
        );
    }
}

#[test]
fn a_large_merge_comes_at_once_under_those_who_use_it() {
    const DIRS: usize = 100;
    const FILES: usize = 200;
    let bed = Bed::new("1G");
    let mount = bed.mount(&[]);
    let pair = Pair { mount: &mount };
    let plain = bed.path().join("expected");
    let each = |write: &dyn Fn(String, String)| {
        for n in 0..DIRS * FILES {
            let name = format!("d{}/f{n}", n % DIRS);
            write(name, format!("text {n}\n"));
        }
    };
    each(&|name, text| pair.write(&format!("src/{name}"), &text));
    pair.write("src/kept", "kept");
    pair.fork();
    each(&|name, text| pair.write(&format!("fork/{name}"), &format!("{text}more\n")));
    pair.write("fork/added/a", "added");
    run_ok(
        Path::new("cp"),
        &["-a", &pair.text("fork"), plain.to_str().unwrap()],
    );
    let kept = File::options()
        .write(true)
        .open(pair.path("src/kept"))
        .unwrap();
    let mut open = File::open(pair.path("src/d7/f7")).unwrap();
    let inodes = ["src", "src/d7", "src/kept"].map(|name| pair.path(name));
    let inodes = inodes.map(|path| (fs::metadata(&path).unwrap().ino(), path));
    let mut shell = Shell::new(
        &pair.path("src/d7"),
        "cat f7 ../added/a; echo; echo made >made",
    );
    let (code, told) = status(&["merge", "--json", "--dry-run", &pair.text("fork")]);
    assert!(code == 0 && told.contains("\"staged\": true"), "{code}");
    assert!(!pair.path("src/added").exists());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                for n in [0, 10_050, 19_999] {
                    let text = pair.read(&format!("src/d{}/f{n}", n % DIRS));
                    let texts = [format!("text {n}\n"), format!("text {n}\nmore\n")];
                    assert!(texts.contains(&text), "{text}");
                }
            }
        });
        let told = done(&["merge", &pair.text("fork")]);
        is_over.store(true, Ordering::SeqCst);
        assert_eq!(told.lines().count(), DIRS * FILES + 1);
        reader.join().unwrap();
    });
    let compared = ["-r", &pair.text("src"), plain.to_str().unwrap()];
    fs::write(plain.join("kept"), "kept").unwrap();
    assert_eq!(run_ok(Path::new("diff"), &compared), "");
    for (inode, path) in inodes {
        assert_eq!(fs::metadata(path).unwrap().ino(), inode, "it stays");
    }
    let mut old = String::new();
    open.read_to_string(&mut old).unwrap();
    assert_eq!(
        old, "text 7\n",
        "a descriptor goes on with the file that it has"
    );
    kept.write_all_at(b"still", 0).unwrap();
    assert_eq!(pair.read("src/kept"), "still");
    shell.go_on();
    let lines = [shell.line(), shell.line(), shell.line()];
    assert_eq!(lines, ["text 7", "more", "added"]);
}

#[test]
fn conflicts_are_told_and_a_side_may_win() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let pair = Pair { mount: &mount };
    pair.write("src/f", "base\n");
    pair.write("src/g", "1\n2\n3\n4\n5\n");
    pair.fork();
    pair.write("fork/f", "theirs\n");
    pair.write("src/f", "ours\n");
    pair.write("fork/g", "one\n2\n3\n4\n5\n");
    pair.write("src/g", "1\n2\n3\n4\nfive\n");
    let fork = pair.text("fork");
    let (code, told) = status(&["merge", &fork]);
    assert_eq!(code, 1, "{told}");
    assert!(
        told.contains("conflict   f: contents changed on both sides"),
        "{told}"
    );
    assert_eq!(
        pair.read("src/g"),
        "1\n2\n3\n4\nfive\n",
        "nothing is merged"
    );
    let (code, told) = status(&["merge", "--json", &fork]);
    let told: Value = serde_json::from_str(told.split_inclusive("\n}").next().unwrap()).unwrap();
    assert_eq!((code, &told["merged"]), (1, &Value::from(false)));
    assert_eq!(told["conflicts"][0]["path"], "f");
    assert_eq!(told["names"][0]["change"], "text");
    let (code, told) = status(&["merge", "--ff-only", &fork]);
    assert!(code == 2 && told.contains("--ff-only"), "{told}");
    assert_eq!(status(&["merge", &pair.text("src")]).0, 2, "it is no fork");
    let (code, told) = status(&["merge", "--theirs", "--dry-run", &fork]);
    assert_eq!((code, told), (0, "taken      f\ntext       g\n".to_owned()));
    assert_eq!(pair.read("src/f"), "ours\n");
    assert_eq!(status(&["merge", "--theirs", &fork]).0, 0);
    assert_eq!(pair.read("src/f"), "theirs\n");
    assert_eq!(pair.read("src/g"), "one\n2\n3\n4\nfive\n");
    done(&["clone", &pair.text("src"), &pair.text("other")]);
    let into_other = ["merge", "--into", &pair.text("other"), &fork];
    assert_eq!(status(&into_other), (0, String::new()), "it is merged");
}

#[test]
fn repositories_are_fetched_and_ignored_names_stay() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let pair = Pair { mount: &mount };
    pair.fork_repository("target\n*.tmp\n");
    pair.write("fork/plain", "new");
    let (code, told) = status(&["merge", &pair.text("fork")]);
    assert_eq!(
        (code, &*told),
        (0, "taken      plain\n"),
        "no index is told"
    );
    fs::remove_file(pair.path("fork/plain")).unwrap();
    fs::remove_file(pair.path("src/plain")).unwrap();
    pair.write("fork/tracked", "changed\n");
    pair.git("fork", &["commit", "-q", "-a", "-m", "second"]);
    pair.write("fork/untracked", "new");
    pair.write("fork/target/built", "fork's");
    pair.write("fork/target/more", "fork's");
    pair.write("fork/x.tmp", "fork's");
    let of = |dir: &str, name: &str| pair.git(dir, &["rev-parse", name]);
    let (before, theirs) = (of("src", "HEAD"), of("fork", "HEAD"));
    let (code, told) = status(&["merge", &pair.text("fork")]);
    assert_eq!(code, 0, "{told}");
    assert!(
        told.starts_with("taken      tracked\ntaken      untracked\nramet: "),
        "{told}"
    );
    assert_eq!(pair.read("src/tracked"), "changed\n");
    assert_eq!(pair.read("src/target/built"), "old");
    assert!(!pair.path("src/x.tmp").exists());
    assert_eq!(of("src", "HEAD"), before);
    assert_eq!(of("src", "refs/forks/fork/main"), theirs);
    let status_of_git = pair.git("src", &["status", "--porcelain"]);
    assert_eq!(
        status_of_git, " M tracked\n?? untracked\n",
        "the index stays"
    );
    pair.git("src", &["fsck", "--strict"]);
    done(&["merge", "--ignored", "take", &pair.text("fork")]);
    assert_eq!(pair.read("src/target/more"), "fork's");
    assert_eq!(pair.read("src/target/built"), "fork's");
    assert!(
        !pair.path("src/x.tmp").exists(),
        "a file alone is not taken"
    );
}

/// No pattern names `out`: all files in one of the two are ignored, and not those of the other.
#[test]
fn a_directory_that_no_pattern_names_is_merged_name_by_name() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let pair = Pair { mount: &mount };
    for name in ["a", "b", "c"] {
        pair.write(&format!("src/out/{name}/a.log"), "base");
    }
    pair.fork_repository("*.log\ntarget\n");
    pair.write("src/out/a/thesis", "months");
    pair.write("fork/out/a/a.log", "fork's");
    pair.write("fork/out/b/report", "fork's");
    pair.write("fork/out/c/b.log", "fork's");
    pair.write("fork/alone/a.log", "fork's");
    pair.write("fork/target/built", "fork's");
    // A directory that the fork alone ignores.
    pair.write("src/mine/thesis", "months");
    pair.write("fork/mine/built", "fork's");
    pair.write("fork/.git/info/exclude", "mine\n");
    let (code, told) = status(&["merge", "--dry-run", &pair.text("fork")]);
    assert_eq!(code, 0, "{told}");
    assert!(
        told.starts_with("taken      out/b/report\nramet: "),
        "{told}"
    );
    done(&["merge", "--ignored", "take", &pair.text("fork")]);
    assert_eq!(pair.read("src/out/a/thesis"), "months");
    assert_eq!(pair.read("src/out/a/a.log"), "base");
    assert_eq!(pair.read("src/out/b/report"), "fork's");
    assert_eq!(pair.read("src/out/c/b.log"), "fork's");
    assert_eq!(pair.read("src/alone/a.log"), "fork's");
    assert_eq!(pair.read("src/target/built"), "fork's");
    assert_eq!(pair.read("src/mine/thesis"), "months");
    assert!(!pair.path("src/mine/built").exists());
    done(&["refresh", &pair.text("fork")]);
    for (name, content) in [
        ("out/a/thesis", "months"),
        ("out/a/a.log", "fork's"),
        ("out/b/report", "fork's"),
        ("mine/thesis", "months"),
        ("mine/built", "fork's"),
    ] {
        assert_eq!(pair.read(&format!("fork/{name}")), content, "{name}");
    }
}

#[test]
fn a_refreshed_fork_has_the_changes_of_both() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = bed.mount(&["-o", transport]);
        let pair = Pair { mount: &mount };
        for name in ["both", "theirs", "ours", "gone", "sub/kept"] {
            pair.write(&format!("src/{name}"), "base\n");
        }
        done(&[
            "fork",
            "--note",
            "text",
            &pair.text("src"),
            &pair.text("fork"),
        ]);
        pair.write("fork/theirs", "fork's\n");
        pair.write("fork/new/file", "fork's\n");
        pair.write("fork/both", "fork's\n");
        pair.write("src/ours", "source's\n");
        pair.write("src/both", "source's\n");
        fs::remove_file(pair.path("src/gone")).unwrap();
        // A conflict leaves the fork as it is, also its number.
        let number = |name: &str| fs::metadata(pair.path(name)).unwrap().ino();
        let before = number("fork");
        let (code, told) = status(&["refresh", &pair.text("fork")]);
        assert_eq!(code, 1, "{told}");
        assert!(told.contains("conflict   both"), "{told}");
        assert_eq!(number("fork"), before);
        assert_eq!(pair.read("fork/ours"), "base\n");
        let names = || {
            let all = fs::read_dir(mount.root()).unwrap();
            let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name();
            let mut all: Vec<_> = all.map(name).collect();
            all.sort();
            all
        };
        assert_eq!(names(), ["fork", "src"]);
        pair.write("src/both", "base\n");
        // A process that works in it.
        let mut shell = Shell::new(&pair.path("fork"), "true");
        let (code, told) = status(&["refresh", &pair.text("fork")]);
        assert_eq!(code, 2, "{told}");
        assert!(told.contains("in use by"), "{told}");
        assert_eq!((number("fork"), names().len()), (before, 2));
        shell.go_on();
        drop(shell);
        // Others see no more of it than before, and a slash at its end changes nothing.
        let private = fs::Permissions::from_mode(0o700);
        fs::set_permissions(pair.path("fork"), private).unwrap();
        let told = done(&["refresh", "--json", &format!("{}/", pair.text("fork"))]);
        let told: Value = serde_json::from_str(&told).unwrap();
        assert_eq!(told["merged"], true, "{told}");
        assert_eq!(told["kept"], pair.text("fork.refresh-1"), "{told}");
        assert_eq!(names(), ["fork", "fork.refresh-1", "src"]);
        assert_eq!(number("fork.refresh-1"), before);
        assert_eq!(pair.read("fork.refresh-1/ours"), "base\n");
        let mode = |name: &str| fs::metadata(pair.path(name)).unwrap().mode() & 0o777;
        assert_eq!((mode("fork"), mode("src")), (0o700, 0o755));
        done(&["drop", &pair.text("fork.refresh-1")]);
        for (name, content) in [
            ("both", "fork's\n"),
            ("theirs", "fork's\n"),
            ("new/file", "fork's\n"),
            ("ours", "source's\n"),
            ("sub/kept", "base\n"),
        ] {
            assert_eq!(pair.read(&format!("fork/{name}")), content, "{name}");
        }
        assert!(!pair.path("fork/gone").exists());
        assert_eq!(pair.read("src/theirs"), "base\n", "the source is untouched");
        // It is a fork of the source, whose base is the source of today.
        let forks = done(&["forks", "--json", &pair.text("fork")]);
        let forks: Value = serde_json::from_str(&forks).unwrap();
        assert_eq!(forks[0]["note"], "text");
        assert_eq!(forks[0]["origin"], pair.text("src"));
        // Three names, and the mode of the top.
        assert_eq!(forks[0]["changed"], 4, "{forks}");
        done(&["merge", "--ff-only", &pair.text("fork")]);
        assert_eq!(pair.read("src/both"), "fork's\n");
        let (code, told) = status(&["refresh", &pair.text("src")]);
        assert_eq!(code, 2, "{told}");
        assert!(told.contains("is no fork"), "{told}");
        done(&["fork", "--no-base", &pair.text("src"), &pair.text("bare")]);
        let (code, told) = status(&["refresh", &pair.text("bare")]);
        assert_eq!(code, 2, "{told}");
        assert!(told.contains("has no base"), "{told}");
        assert_eq!(names(), ["bare", "fork", "src"]);
        mount.umount();
        bed.fsck();
    }
}

/// The source may let users in that the fork keeps out.
#[test]
fn a_refreshed_fork_has_the_access_lists_that_it_had() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let pair = Pair { mount: &mount };
    let must = |program: &str, args: &[&str]| {
        let out = std::process::Command::new(program).args(args).output();
        let out = out.expect("it is installed");
        assert!(out.status.success(), "{program} {args:?}: {out:?}");
        String::from_utf8(out.stdout).expect("names are text")
    };
    pair.write("src/file", "base\n");
    let lists = "u:4321:rx,d:u:4321:rx";
    must("setfacl", &["-m", lists, &pair.text("src")]);
    for fork in ["none", "other"] {
        done(&["fork", &pair.text("src"), &pair.text(fork)]);
        must("setfacl", &["-b", &pair.text(fork)]);
        must("chmod", &["750", &pair.text(fork)]);
    }
    must("setfacl", &["-m", "u:77:r", &pair.text("other")]);
    for fork in ["none", "other"] {
        let fork = pair.text(fork);
        let list = || must("getfacl", &["-cnpE", &fork]);
        let before = list();
        assert!(!before.contains("4321"), "{before}");
        done(&["refresh", &fork]);
        assert_eq!(list(), before);
    }
    mount.umount();
    bed.fsck();
}

#[test]
fn a_refresh_keeps_commits_and_ignored_names() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let pair = Pair { mount: &mount };
    pair.fork_repository("target\n.env\n");
    pair.write("fork/tracked", "changed\n");
    pair.git("fork", &["commit", "-q", "-a", "-m", "of the fork"]);
    pair.write("fork/target/built", "fork's");
    pair.write("fork/.env", "secret");
    pair.write("src/later", "source's\n");
    pair.git("src", &["add", "."]);
    pair.git("src", &["commit", "-q", "-m", "of the source"]);
    let of = |dir: &str, name: &str| pair.git(dir, &["rev-parse", name]);
    let (theirs, ours) = (of("fork", "HEAD"), of("src", "HEAD"));
    let (code, told) = status(&["refresh", &pair.text("fork")]);
    assert_eq!((code, told.contains("ramet: ")), (0, false), "{told}");
    assert_eq!(of("fork", "HEAD"), ours);
    assert_eq!(of("fork", "refs/forks/fork/main"), theirs);
    assert_eq!(pair.read("fork/target/built"), "fork's");
    assert_eq!(pair.read("fork/.env"), "secret");
    assert_eq!(pair.read("fork/later"), "source's\n");
    assert_eq!(pair.git("fork", &["status", "--porcelain"]), " M tracked\n");
    // References of the first time come along.
    pair.git("fork", &["commit", "-q", "-a", "-m", "once more"]);
    let second = of("fork", "HEAD");
    let (code, told) = status(&["refresh", &pair.text("fork")]);
    assert_eq!(code, 0, "{told}");
    let all = pair.git(
        "fork",
        &["for-each-ref", "--format=%(objectname)", "refs/forks"],
    );
    for commit in [&theirs, &second] {
        assert!(all.contains(commit.trim()), "{all}");
    }
    // The commits are also where they were, in the fork as it was.
    for (kept, head) in [("fork.refresh-1", &theirs), ("fork.refresh-2", &second)] {
        assert_eq!(&of(kept, "HEAD"), head, "{told}");
        assert!(told.contains(kept) || kept == "fork.refresh-1", "{told}");
    }
    pair.git("fork", &["fsck", "--strict"]);
}
