//! Failures of the command: one line that names the object and the reason, and a useful exit
//! status.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ramet_e2e::{Bed, ramet_bin, run, run_ok};
use rustix::fs::CWD;
use rustix::mount::{OpenTreeFlags, open_tree};
use rustix::process::{Pid, Signal, kill_process};

/// How long the threads of a daemon may take to stop, or to go on.
const SIGNAL_MAX: Duration = Duration::from_secs(30);

/// Runs `ramet` expecting failure; returns the exit status and the one line it said.
fn refused(args: &[&Path]) -> (i32, String) {
    let out = run(ramet_bin(), args);
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success(), "{args:?} succeeded");
    assert!(out.stdout.is_empty(), "{args:?} wrote to standard output");
    assert_eq!(text.lines().count(), 1, "{args:?} said: {text}");
    assert!(text.starts_with("ramet: "), "{args:?} said: {text}");
    (out.status.code().expect("it exits"), text)
}

fn says(args: &[&Path], words: &str) {
    let (_, text) = refused(args);
    assert!(text.contains(words), "expected '{words}', got: {text}");
}

fn path(text: &str) -> &Path {
    Path::new(text)
}

#[test]
fn refusals_before_a_mount_say_why() {
    let bed = Bed::new("64M");
    let (volume, dir) = (bed.volume(), bed.mount_point());
    let text = bed.path().join("letter.txt");
    fs::write(&text, "Dear volume,\n".repeat(1000)).expect("ours");
    let nowhere = bed.path().join("nowhere");

    says(&[path("mount"), &text, &dir], "not a Ramet volume");
    says(&[path("mount"), &nowhere, &dir], "no such file");
    says(&[path("mount"), &volume, &nowhere], "no such file");
    says(&[path("mount"), &volume, &text], "not a directory");
    says(
        &[path("mount"), bed.path(), &dir],
        "neither a regular file nor a block device",
    );
    says(&[path("mkfs"), &volume], "--force");
    says(
        &[path("mkfs"), path("--size"), path("1G"), &text],
        "--force",
    );
    says(&[path("mkfs"), &nowhere], "--size");
    says(&[path("umount"), &dir], "not a Ramet mount");
    says(&[path("sync"), &dir], "not on a Ramet mount");
    says(&[path("clone"), &text, &nowhere], "not on a Ramet mount");
    says(&[path("rm"), &text], "not on a Ramet mount");
    says(&[path("stat"), &text], "not a Ramet volume");

    let short = bed.path().join("short");
    fs::copy(&volume, &short).expect("there is room");
    File::options()
        .write(true)
        .open(&short)
        .expect("ours")
        .set_len(1 << 20)
        .expect("ours");
    says(&[path("mount"), &short, &dir], "truncated");
}

#[test]
fn fsck_exits_as_fsck_does() {
    let bed = Bed::new("64M");
    assert!(
        run(ramet_bin(), &[path("fsck"), &bed.volume()])
            .status
            .success()
    );
    let text = bed.path().join("letter.txt");
    fs::write(&text, "Dear volume,\n".repeat(1000)).expect("ours");
    assert_eq!(refused(&[path("fsck"), &text]).0, 8);
    assert_eq!(refused(&[path("fsck"), path("/nowhere")]).0, 8);
    assert_eq!(
        run(ramet_bin(), &["fsck", "--no-such-option"])
            .status
            .code(),
        Some(16)
    );
    let file = File::options()
        .write(true)
        .open(bed.volume())
        .expect("ours");
    let spoil = |places: [u64; 2]| {
        for addr in places {
            file.write_all_at(&[0xaa; 4000], addr + 64).expect("ours");
        }
    };
    let fsck = |option: &str| {
        let out = run(ramet_bin(), &[path("fsck"), path(option), &bed.volume()]);
        (
            out.status.code(),
            String::from_utf8_lossy(&out.stdout).into_owned(),
        )
    };
    // A copy of each: nothing is lost, and no power cut does that.
    spoil([0, 32_768]);
    let (status, text) = fsck("--files");
    assert!(status == Some(4) && text.contains("B1 copy"), "{text}");
    // Both copies of one.
    spoil([65_536, 32_768]);
    let (status, text) = fsck("--files");
    assert!(
        status == Some(4) && text.contains("newest superblock may be lost"),
        "{text}"
    );
    assert_eq!(fsck("--repair").0, Some(1));
    assert_eq!(fsck("--files").0, Some(0));
    // All: there is a volume, but nothing to start from.
    spoil([0, 32_768]);
    spoil([65_536, 98_304]);
    let (status, _) = refused(&[path("fsck"), &bed.volume()]);
    assert!(status & 12 != 0, "exit status {status}");
}

#[test]
fn fsck_goes_back_only_to_a_whole_superblock() {
    let bed = Bed::new("64M");
    for text in ["old", "new"] {
        let mount = bed.mount(&[]);
        fs::write(mount.root().join(text), text).expect("the mount is writable");
        mount.umount();
    }
    let file = File::options()
        .read(true)
        .write(true)
        .open(bed.volume())
        .expect("ours");
    let slots = [[0, 98_304], [65_536, 32_768]];
    let generation = |addr: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, addr + 32).expect("ours");
        u64::from_le_bytes(bytes)
    };
    let newest = slots
        .iter()
        .max_by_key(|copies| generation(copies[0]))
        .expect("there are two");
    for addr in newest {
        file.write_all_at(&[0xaa; 4000], addr + 64).expect("ours");
    }
    let area = || {
        let mut bytes = vec![0; 128 << 10];
        file.read_exact_at(&mut bytes, 0).expect("ours");
        bytes
    };
    let before = area();
    // The space that the lost checkpoint gave back has other contents by now.
    let end = file.metadata().expect("ours").len();
    let mut at = 4 << 20;
    while at < end {
        file.write_all_at(&[0xaa; 64 << 10], at).expect("ours");
        at += 64 << 10;
    }
    let (status, text) = refused(&[path("fsck"), path("--repair"), &bed.volume()]);
    assert_eq!(status, 4, "{text}");
    assert!(text.contains("newest superblock may be lost"), "{text}");
    assert!(area() == before, "a repair that failed wrote");
}

#[test]
fn refusals_on_a_mount_say_why() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let other = Bed::new("64M");
    let root = mount.root().to_path_buf();
    let (a, b) = (root.join("a"), root.join("b"));
    fs::create_dir(&a).expect("the mount is writable");
    fs::create_dir(&b).expect("the mount is writable");

    says(
        &[path("mount"), &bed.volume(), &other.mount_point()],
        "already mounted",
    );
    says(&[path("mount"), &other.volume(), &root], "already");
    says(&[path("fsck"), &bed.volume()], "mounted");
    says(&[path("mkfs"), path("--force"), &bed.volume()], "mounted");
    for option in [&[][..], &[path("--no-replace")]] {
        let args = [&[path("clone")], option, &[&a, &b]].concat();
        says(&args, "already exists");
        says(&args, "/b/' clones into it, --replace replaces it");
    }
    let file = root.join("file");
    fs::write(&file, "x").expect("the mount is writable");
    let replace = [path("clone"), path("--replace")];
    says(&[&replace[..], &[&file, &b]].concat(), "is a directory");
    says(&[&replace[..], &[&a, &file]].concat(), "is not a directory");
    says(&[&replace[..], &[&a, &a]].concat(), "source itself");
    says(&[&replace[..], &[&file, &file]].concat(), "source itself");
    says(
        &[path("clone"), &file, &root.join("none/")],
        "not an existing directory",
    );
    says(
        &[path("clone"), path("/"), &root.join("a/")],
        "no name of its own",
    );
    says(
        &[path("clone"), &a, &bed.path().join("outside")],
        "not on a Ramet mount",
    );
    says(&[path("clone"), &root.join("none"), &b], "no such file");
    says(&[path("rm"), &root.join("a/.")], "not a name");
    says(&[path("rm"), &root.join("file/")], "not a directory");
    says(&[path("rm"), &root.join("none")], "no such file");
    let views = root.join(".ramet");
    says(&[path("rm"), &views], "part of the mount");
    says(&[path("rm"), path("-f"), &views], "part of the mount");
    says(&[path("umount"), &a], "not a Ramet mount");
    let held = File::create(root.join("held")).expect("the mount is writable");
    says(&[path("umount"), &root], "busy");
    drop(held);

    mount.kill_daemon();
    says(&[path("sync"), &root], "ramet umount");
    says(&[path("clone"), &a, &b], "ramet umount");
    says(&[path("stat"), &root], "ramet umount");
    says(&[path("mount"), &other.volume(), &root], "ramet umount");
    mount.detach_dead();
    bed.mount(&[]).umount();
    bed.fsck();
}

#[test]
fn refusals_of_another_users_files_say_whose_they_must_be() {
    // `nobody`, which every Debian has.
    const USER: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        println!("not root: nothing can be another user's");
        return;
    }
    let bed = Bed::new("64M");
    let mount = bed.mount(&[]);
    let bin = bed.command_for_others();
    let root = mount.root().to_path_buf();
    fs::set_permissions(&root, PermissionsExt::from_mode(0o1777)).expect("root may");
    let [mine, theirs, file] = ["mine", "theirs", "file"].map(|name| root.join(name));
    fs::create_dir(&mine).expect("root may");
    std::os::unix::fs::chown(&mine, Some(USER), Some(USER)).expect("root may");
    fs::create_dir(&theirs).expect("root may");
    fs::write(&file, "x").expect("root may");
    let says_to_user = |args: &[&Path], words: &[&str]| {
        let mut command = Command::new(&bin);
        let out = command.args(args).uid(USER).gid(USER).output();
        let out = out.expect("it runs");
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{said}");
        for words in words {
            assert!(said.contains(words), "expected '{words}', got: {said}");
        }
    };
    let copy = root.join("copy");
    says_to_user(
        &[path("clone"), &theirs, &copy],
        &["/theirs: ", "may clone it"],
    );
    says_to_user(
        &[path("clone"), path("--replace"), &mine, &theirs],
        &["/theirs: ", "may replace"],
    );
    let note = root.join("note");
    fs::write(&note, "x").expect("root may");
    std::os::unix::fs::chown(&note, Some(USER), Some(USER)).expect("root may");
    says_to_user(
        &[path("clone"), path("--replace"), &note, &file],
        &["/file: ", "may replace"],
    );
    says_to_user(
        &[path("rm"), &theirs],
        &["/theirs: ", "only its owner", "rm -r"],
    );
    says_to_user(&[path("rm"), &file], &["/file: ", "only its owner"]);
    says_to_user(&[path("umount"), &root], &["only root and the user"]);
    let mut scrub = Command::new(&bin);
    let out = scrub.arg("scrub").arg(&root).uid(USER).gid(USER).output();
    let out = out.expect("it runs");
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(8), "{said}");
    assert!(said.contains("may scrub it"), "{said}");
    mount.umount();
    bed.fsck();
}

#[test]
fn a_mount_point_is_neither_removed_nor_replaced() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: nothing can be mounted there");
        return;
    }
    let bed = Bed::new("64M");
    let mount = bed.mount(&[]);
    let (tree, inner) = (mount.root().join("tree"), mount.root().join("tree/inner"));
    let (other, bound) = (mount.root().join("other"), bed.path().join("bound"));
    for dir in [&inner, &other, &bound] {
        fs::create_dir_all(dir).expect("ours");
    }
    fs::write(bound.join("file"), "x").expect("ours");
    run_ok("mount", &[path("--bind"), &bound, &inner]);
    let words = format!("mounted on {}", inner.display());
    for at in [&tree, &inner] {
        says(&[path("rm"), at], &words);
        says(&[path("clone"), path("--replace"), &other, at], &words);
    }
    assert!(inner.join("file").exists(), "it is no longer mounted");
    run_ok("umount", &[&inner]);
    mount.replace_path(&other, &tree);
    mount.remove(&tree);
    mount.umount();
    bed.fsck();
}

/// Starts `ramet umount` of `dir`, which is killed if it does not end.
fn unmounting(dir: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "60"]).arg(ramet_bin());
    command.arg("umount").arg(dir);
    command
}

#[test]
fn a_volume_that_stays_mounted_elsewhere_is_not_waited_for_in_silence() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: nothing can be mounted twice");
        return;
    }
    let bed = Bed::new("64M");
    let mount = bed.mount(&[]);
    let root = mount.root().to_path_buf();
    let copy = bed.path().join("copy");
    fs::create_dir(&copy).expect("ours");
    run_ok("mount", &[path("--bind"), &root, &copy]);
    for (dir, other) in [(&root, &copy), (&copy, &root)] {
        let out = unmounting(dir).output().expect("timeout(1) runs");
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(1), "{said}");
        let words = format!("also mounted on {} ", other.display());
        assert!(said.contains(&words), "{said}");
        fs::read_dir(dir).expect("still mounted");
    }
    run_ok("umount", &[&copy]);

    // A copy that is nowhere stands for one in a namespace of its own.
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let elsewhere = open_tree(CWD, &root, flags).expect("root may");
    let mut unmount = unmounting(&root)
        .stderr(Stdio::piped())
        .spawn()
        .expect("timeout(1) runs");
    let mut said = String::new();
    let stderr = unmount.stderr.take().expect("a pipe");
    let heard = BufReader::new(stderr).read_line(&mut said);
    heard.expect("readable");
    assert!(
        said.contains("still mounted in another mount namespace, waiting"),
        "{said}"
    );
    assert!(unmount.try_wait().expect("ours").is_none(), "it waits");
    drop(elsewhere);
    assert!(unmount.wait().expect("ours").success());
    mount.is_unmounted();
    bed.fsck();
}

/// Waits until each thread of a process is stopped, or none is.
fn await_threads(pid: Pid, stopped: bool) {
    let start = Instant::now();
    let tasks = format!("/proc/{}/task", pid.as_raw_nonzero());
    let is_as_wanted = |stat: String| {
        let (_, state) = stat.rsplit_once(") ").expect("proc(5) says so");
        state.starts_with('T') == stopped
    };
    let are_as_wanted = || {
        let mut tasks = fs::read_dir(&tasks).expect("it runs");
        // A thread that has ended meanwhile has no state any more.
        tasks.all(|task| {
            let stat = fs::read_to_string(task.expect("listed").path().join("stat"));
            stat.map_or(true, is_as_wanted)
        })
    };
    while !are_as_wanted() {
        assert!(start.elapsed() < SIGNAL_MAX, "{tasks}");
        std::thread::yield_now();
    }
}

#[test]
fn a_daemon_that_was_stopped_for_a_while_goes_on() {
    for options in ["defaults", "no_io_uring"] {
        let bed = Bed::new("256M");
        let mount = bed.mount(&["-o", options]);
        let file = mount.root().join("file");
        fs::write(&file, "before").expect("the mount is writable");
        for signal in [Signal::STOP, Signal::CONT] {
            kill_process(mount.pid(), signal).expect("it runs");
            await_threads(mount.pid(), signal == Signal::STOP);
        }
        fs::write(&file, "after").expect("the mount is writable");
        assert_eq!(fs::read_to_string(&file).expect("readable"), "after");
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn a_terminated_daemon_unmounts_cleanly() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    fs::write(mount.root().join("file"), "kept").expect("the mount is writable");
    mount.terminate();
    assert!(!bed.mount_point().join("file").exists());
    bed.fsck();
    let mount = bed.mount(&[]);
    assert_eq!(
        fs::read_to_string(mount.root().join("file")).expect("kept"),
        "kept"
    );
    mount.umount();
}

#[test]
fn snapshots_are_not_forked_and_standard_output_is_no_volume() {
    let bed = Bed::new("64M");
    let mount = bed.mount(&[]);
    let dir = mount.root().join("dir");
    fs::create_dir(&dir).expect("there is room");
    let snapshot = ["snapshot", "create"].map(path);
    run_ok(
        ramet_bin(),
        &[&snapshot[..], &[mount.root(), path("one")]].concat(),
    );
    let view = mount.root().join(".ramet/snapshots/one/dir");
    says(
        &[path("fork"), &view, &mount.root().join("fork")],
        "'ramet clone' copies",
    );
    run_ok(
        ramet_bin(),
        &[path("clone"), &view, &mount.root().join("clone")],
    );

    for verb in ["export", "send"] {
        let full = File::options()
            .write(true)
            .open("/dev/full")
            .expect("a device");
        let out = Command::new(ramet_bin())
            .arg(verb)
            .arg(&dir)
            .stdout(full)
            .output()
            .expect("the command runs");
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(said, "ramet: standard output: no space left\n", "{verb}");
    }
    mount.umount();
}

#[test]
fn results_for_a_closed_standard_output_are_a_failure() {
    let bed = Bed::new("64M");
    let mount = bed.mount(&[]);
    let dir = mount.root().join("dir");
    fs::create_dir(&dir).expect("there is room");
    let with = |stream: &str, args: &[&str]| {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("exec \"$@\" {stream}"), "sh"]);
        command.arg(ramet_bin()).args(args).arg(&dir);
        command.output().expect("the command runs")
    };
    for args in [
        &["export"][..],
        &["send"],
        &["du"],
        &["du", "--json"],
        &["stat", "--json"],
        &["fork", "--json"],
    ] {
        // It is closed, or open for reading only.
        for stream in [">&-", "1</dev/null"] {
            let out = with(stream, args);
            let said = String::from_utf8_lossy(&out.stderr);
            assert_eq!(said, "ramet: standard output: it is closed\n", "{args:?}");
            assert_eq!(out.status.code(), Some(1), "{args:?}");
        }
    }
    // Help and the version are results, and a full device takes none.
    for (args, status) in [("--version", 1), ("fork --help", 1), ("fsck --help", 8)] {
        for stream in [">&-", "1</dev/null", ">/dev/full"] {
            let script = format!("exec \"$0\" {args} {stream}");
            let mut command = Command::new("sh");
            command.args(["-c", &script]).arg(ramet_bin());
            let out = command.output().expect("the command runs");
            let said = String::from_utf8_lossy(&out.stderr);
            assert!(said.starts_with("ramet: standard output: "), "{said}");
            assert_eq!(out.status.code(), Some(status), "{args} {stream}");
        }
    }
    // A command without a result does not need it.
    for verb in ["sync", "rm"] {
        let out = with(">&-", &[verb]);
        assert!(out.status.success() && out.stderr.is_empty(), "{out:?}");
    }
    mount.umount();
}

/// Runs the command twice at once; returns the success and the complaint of both.
fn twice(args: &[&Path]) -> [(bool, String); 2] {
    let start = || {
        let mut command = Command::new(ramet_bin());
        command
            .args(args)
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        command.spawn().expect("the command runs")
    };
    [start(), start()].map(|child| {
        let out = child.wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        (out.status.success(), said)
    })
}

#[test]
fn two_that_mount_or_unmount_at_once_hear_the_reason() {
    let bed = Bed::new("64M");
    for _ in 0..10 {
        let (volume, dir) = (bed.volume(), bed.mount_point());
        let mut outcomes = twice(&[path("mount"), &volume, &dir]);
        outcomes.sort();
        let [(refused, why), (mounted, _)] = &outcomes;
        assert!(mounted & !refused, "{outcomes:?}");
        assert!(why.contains("already mounted"), "{why}");
        let mount = bed.mounted();
        for (has_unmounted, why) in twice(&[path("umount"), &dir]) {
            assert!(has_unmounted || why.contains("not a Ramet mount"), "{why}");
        }
        mount.is_unmounted();
    }
    bed.fsck();
}
