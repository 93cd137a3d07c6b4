//! A daemon depends on nothing of the process that started it.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use ramet_block::superblock::read_superblock;
use ramet_block::{Access, FileDevice};
use ramet_e2e::{Bed, Mount, children_of, is_mount_point, kill_and_wait, ramet_bin, run, until};

/// How long a command may take, which is done in a moment.
const PATIENCE: Duration = Duration::from_secs(10);

/// `nobody`, which every Debian has.
const USER: u32 = 65534;

/// Mounts the volume from a program: `sh` or `python3`, whose `script` runs
/// `$RAMET mount $VOLUME $DIR` in some way.
fn start(bed: &Bed, program: &[&str], script: &str) -> Output {
    Command::new(program[0])
        .args(&program[1..])
        .args(["-c", script])
        .env("RAMET", ramet_bin())
        .env("VOLUME", bed.volume())
        .env("DIR", bed.mount_point())
        .current_dir(bed.path())
        .output()
        .expect("it runs")
}

fn started(bed: &Bed, program: &[&str], script: &str) -> Mount {
    let out = start(bed, program, script);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && said.is_empty(), "{said}");
    bed.mounted()
}

fn proc(mount: &Mount, file: &str) -> String {
    let path = format!("/proc/{}/{file}", mount.pid().as_raw_pid());
    let bytes = fs::read(&path).expect("the daemon runs");
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn a_daemon_keeps_no_lock_and_no_pipe_of_its_starter() {
    let bed = Bed::new("64M");
    let script = r#"exec 7>lock 9>kept; flock -n 7 && "$RAMET" mount "$VOLUME" "$DIR""#;
    let mount = started(&bed, &["bash"], script);
    let fds = format!("/proc/{}/fd", mount.pid().as_raw_pid());
    for fd in fs::read_dir(fds).expect("the daemon runs") {
        let target = fs::read_link(fd.expect("listed").path());
        let is_kept = |path: &Path| path.ends_with("lock") || path.ends_with("kept");
        assert!(
            !target.is_ok_and(|path| is_kept(&path)),
            "a descriptor is kept"
        );
    }
    let locked = Command::new("flock")
        .arg("-n")
        .arg(bed.path().join("lock"))
        .arg("true")
        .status();
    assert!(locked.expect("it runs").success(), "the lock is still held");
    assert_eq!(proc(&mount, "comm").trim(), "ramet");
    assert!(proc(&mount, "cmdline").starts_with("ramet\0mount\0"));
    let cwd = fs::read_link(format!("/proc/{}/cwd", mount.pid().as_raw_pid()));
    assert_eq!(cwd.expect("the daemon runs"), Path::new("/"));
    assert_eq!(proc(&mount, "oom_score_adj").trim(), "0");
    mount.umount();
    bed.fsck();
}

/// Whether the volume was closed in order; `None` while a daemon has it.
fn is_closed_in_order(bed: &Bed) -> Option<bool> {
    let device = FileDevice::open(bed.volume(), Access::ReadOnly).ok()?;
    Some(read_superblock(&device).expect("it is a volume").clean)
}

/// A daemon of the volume with `limit` descriptors, whose starter is the test.
fn daemon(bed: &Bed, limit: u32, stdout: impl Into<Stdio>) -> Command {
    let mut command = Command::new("prlimit");
    command.arg(format!("--nofile={limit}")).arg(ramet_bin());
    command.args(["mount", "--foreground", "--daemon", "-o", "no_io_uring"]);
    command.arg(bed.volume()).arg(bed.mount_point());
    command.stdout(stdout).stderr(Stdio::null());
    command
}

#[test]
fn a_mount_that_is_used_when_its_starter_goes_ends_with_its_user_and_loses_nothing() {
    let bed = Bed::new("64M");
    let (told, mut teller) = std::io::pipe().expect("there are pipes");
    // A full pipe holds the daemon up just when the mount is usable.
    teller.write_all(&[b'x'; 65536]).expect("it has room");
    let mut daemon = daemon(&bed, 1024, teller).spawn().expect("it runs");
    until("the mount stands", || is_mount_point(&bed.mount_point()));
    let mut used = fs::File::create_new(bed.mount_point().join("used")).expect("it is served");
    used.write_all(b"before ").expect("it is served");
    drop(told);
    until("the mount is gone", || !is_mount_point(&bed.mount_point()));
    used.write_all(b"after").expect("it is served");
    assert!(daemon.try_wait().expect("it is a child").is_none());
    drop(used);
    daemon.wait().expect("it is a child");
    assert_eq!(is_closed_in_order(&bed), Some(true));
    let mount = bed.mount(&[]);
    let kept = fs::read(mount.root().join("used")).expect("it is there");
    assert_eq!(kept, b"before after");
    mount.umount();
    bed.fsck();
}

#[test]
fn a_mount_that_lacks_a_descriptor_closes_the_volume() {
    let bed = Bed::new("64M");
    let mut refused = 0;
    for limit in 8..100 {
        let mut daemon = daemon(&bed, limit, Stdio::piped())
            .spawn()
            .expect("it runs");
        let mut told = BufReader::new(daemon.stdout.take().expect("it is a pipe")).lines();
        let told = told.find(|line| !line.as_ref().is_ok_and(|line| line.starts_with("note: ")));
        if told.is_some_and(|line| line.is_ok_and(|line| line == "ready")) {
            bed.mounted().umount();
            daemon.wait().expect("it is a child");
            break;
        }
        daemon.wait().expect("it is a child");
        assert!(!is_mount_point(&bed.mount_point()));
        assert_eq!(is_closed_in_order(&bed), Some(true), "{limit} descriptors");
        refused += 1;
    }
    assert!((1..92).contains(&refused), "{refused}");
    bed.fsck();
}

#[test]
fn an_unmount_waits_for_a_daemon_of_another_pid_namespace_and_for_no_stranger() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: no PID namespace");
        return;
    }
    let bed = Bed::new("512M");
    let script = r#""$RAMET" mount "$VOLUME" "$DIR" && cat"#;
    let mut others = Command::new("unshare")
        .args(["--pid", "--fork", "--kill-child", "sh", "-c", script])
        .env("RAMET", ramet_bin())
        .env("VOLUME", bed.volume())
        .env("DIR", bed.mount_point())
        .stdin(Stdio::piped())
        .spawn()
        .expect("it runs");
    until("the mount stands", || is_mount_point(&bed.mount_point()));
    fs::write(bed.mount_point().join("file"), vec![7; 64 << 20]).expect("there is room");
    let out = Command::new("timeout")
        .args(["--signal=KILL", "60"])
        .args([ramet_bin(), "umount".as_ref(), &bed.mount_point()])
        .output()
        .expect("it runs");
    let released = is_closed_in_order(&bed);
    // The daemon ends with its namespace.
    drop(others.stdin.take());
    others.wait().expect("it is a child");
    assert!(out.status.success(), "{out:?}");
    assert_eq!(released, Some(true));
    bed.fsck();
}

/// Names of the threads of the daemon, except those that take requests: their number depends on the
/// machine.
fn threads(mount: &Mount) -> Vec<String> {
    let tasks = fs::read_dir(format!("/proc/{}/task", mount.pid().as_raw_pid()));
    let names = tasks.expect("the daemon runs").filter_map(|task| {
        // A thread may end meanwhile.
        let name = fs::read_to_string(task.ok()?.path().join("comm")).ok()?;
        Some(name.trim().to_owned())
    });
    let takes_requests = |name: &String| name.starts_with("reader-") || name.starts_with("ring-");
    let mut names: Vec<_> = names.filter(|name| !takes_requests(name)).collect();
    names.sort();
    names
}

#[test]
fn a_mount_that_nobody_uses_has_few_threads() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let file = mount.root().join("tree/file");
    fs::create_dir(mount.root().join("tree")).expect("made");
    fs::write(&file, "text").expect("written");
    mount.clone_path(&mount.root().join("tree"), &mount.root().join("copy"));
    mount.remove(&mount.root().join("tree"));
    fs::File::open(mount.root().join("copy/file"))
        .and_then(|file| file.sync_all())
        .expect("synced");
    assert!(
        threads(&mount).iter().any(|name| name.ends_with("-0")),
        "jobs were done"
    );
    let begun = Instant::now();
    while threads(&mount).len() > 18 {
        assert!(begun.elapsed() < 6 * PATIENCE, "{:?}", threads(&mount));
        thread::sleep(Duration::from_millis(100));
    }
    mount.umount();
}

#[test]
fn a_daemon_outlives_the_limits_of_its_starter() {
    let bed = Bed::new("256M");
    let script = r#"ulimit -S -f 100 && ulimit -S -t 1 && ulimit -S -n 16 && "$RAMET" mount "$VOLUME" "$DIR""#;
    let mount = started(&bed, &["bash"], script);
    let limits = proc(&mount, "limits");
    for line in limits.lines() {
        let fields: Vec<&str> = line[26..].split_whitespace().collect();
        let is_left = line.starts_with("Max core") || line.starts_with("Max stack");
        assert!(
            line.starts_with("Limit") || is_left || fields[0] == fields[1],
            "{line}"
        );
    }
    fs::write(mount.root().join("file"), vec![7; 64 << 20]).expect("there is room");
    mount.umount();
    bed.fsck();
}

#[test]
fn a_file_limit_below_the_volume_is_refused_at_mount() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: no user can be chosen");
        return;
    }
    let bed = Bed::new("64M");
    bed.hand_to(USER, USER);
    std::os::unix::fs::chown(bed.volume(), Some(USER), Some(USER)).expect("root may");
    let bin = bed.command_for_others();
    let mut shell = Command::new("bash");
    shell.args(["-c", r#"ulimit -f 1000 && "$0" mount "$1" "$2""#]);
    shell.arg(bin).arg(bed.volume()).arg(bed.mount_point());
    let out = shell
        .uid(USER)
        .gid(USER)
        .current_dir("/")
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(
        !out.status.success() && said.contains("limit on the size of files"),
        "{said}"
    );
}

#[test]
fn a_daemon_hears_signals_that_its_starter_blocked_or_ignored() {
    let bed = Bed::new("64M");
    let script = "import os, signal, subprocess
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD})
for ignored in (signal.SIGTERM, signal.SIGINT):
    signal.signal(ignored, signal.SIG_IGN)
e = os.environ
subprocess.run([e['RAMET'], 'mount', e['VOLUME'], e['DIR']], check=True)";
    let mount = started(&bed, &["python3"], script);
    mount.terminate();
    bed.fsck();
}

#[test]
fn a_daemon_whose_log_cannot_be_written_serves_and_ends() {
    for log in ["/dev/full", "fifo"] {
        let bed = Bed::new("64M");
        // The reader of the pipe goes at once.
        let script = format!(
            r#"mkfifo fifo; head -c 1 fifo >head & RAMET_LOG=trace "$RAMET" mount "$VOLUME" "$DIR" --log {log}; s=$?; wait; exit $s"#
        );
        let script = if log == "fifo" {
            script
        } else {
            format!(r#"RAMET_LOG=trace "$RAMET" mount "$VOLUME" "$DIR" --log {log}"#)
        };
        let mount = started(&bed, &["bash"], &script);
        for n in 0..100 {
            fs::write(mount.root().join(n.to_string()), "x").expect("it serves");
        }
        mount.terminate();
        bed.fsck();
    }
}

#[test]
fn every_change_of_a_synchronous_mount_is_there_after_a_kill() {
    for options in ["sync", "dirsync"] {
        let bed = Bed::new("256M");
        let mount = bed.mount(&["-o", options]);
        let at = |name: &str| mount.root().join(name);
        fs::create_dir(at("dir")).expect("writable");
        fs::write(at("dir/file"), "content").expect("writable");
        fs::rename(at("dir/file"), at("moved")).expect("writable");
        fs::hard_link(at("moved"), at("dir/link")).expect("writable");
        fs::create_dir(at("gone")).expect("writable");
        fs::remove_dir(at("gone")).expect("writable");
        mount.clone_path(&at("dir"), &at("clone"));
        fs::set_permissions(at("moved"), PermissionsExt::from_mode(0o640)).expect("ours");
        mount.kill_daemon();
        mount.detach_dead();
        let mount = bed.mount(&[]);
        let at = |name: &str| mount.root().join(name);
        for name in ["moved", "dir/link", "clone/link"] {
            let found = fs::read_to_string(at(name)).expect("it is there");
            assert_eq!(found, "content", "{options}: {name}");
        }
        assert!(!at("gone").exists() && !at("dir/file").exists());
        let mode = fs::metadata(at("moved"))
            .expect("it is there")
            .permissions();
        assert_eq!(mode.mode() & 0o777, 0o640);
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn options_of_fstab_lines_are_taken_or_refused_with_the_reason() {
    let bed = Bed::new("64M");
    let taken = "strictatime,nodiratime,lazytime,async,users,user,owner,group,auto,noauto,defaults,\
                 _netdev,nofail,x-systemd.automount,comment=x,nosymfollow";
    bed.mount(&["-o", taken]).umount();
    for (option, why) in [("mand", "locks"), ("bind", "mount(8)")] {
        let (volume, dir) = (bed.volume(), bed.mount_point());
        let args = [
            Path::new("mount"),
            &volume,
            &dir,
            Path::new("-o"),
            Path::new(option),
        ];
        let out = ramet_e2e::run(ramet_bin(), &args);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(
            !out.status.success() && said.contains(option) && said.contains(why),
            "{said}"
        );
    }
}

#[test]
fn a_reader_that_has_gone_ends_a_command_in_silence() {
    let bed = Bed::new("64M");
    let script = r#"for verb in stat "stat --json" fsck "fsck --json" help; do
        { "$RAMET" $verb $([ "$verb" = help ] || echo "$VOLUME") 2>>said; echo "$?" >>status; } | true
    done; cat said; grep -v -x -e 0 -e 141 status; "$RAMET" stat "$VOLUME" >/dev/full"#;
    let out = start(&bed, &["bash"], script);
    assert!(
        out.stdout.is_empty(),
        "{}",
        String::from_utf8_lossy(&out.stdout)
    );
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(
        said.starts_with("ramet: standard output: no space left"),
        "{said}"
    );
    assert_eq!(out.status.code(), Some(1));
}

/// Whether the kernel offers rings to FUSE file systems.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
/// Held by a test that turns the switch, or that needs it on.
static TURNS: Mutex<()> = Mutex::new(());

#[test]
fn a_mount_tells_that_it_switched_io_uring_on_for_the_machine() {
    /// Gives the machine its setting back.
    struct Undo(String);
    impl Drop for Undo {
        fn drop(&mut self) {
            fs::write(SWITCH, &self.0).expect("it was written before");
        }
    }
    let is_root = rustix::process::geteuid().is_root();
    let Some(before) = fs::read_to_string(SWITCH).ok().filter(|_| is_root) else {
        println!("no switch that could be turned");
        return;
    };
    let _turns = TURNS.lock();
    let _undo = Undo(before);
    fs::write(SWITCH, "N").expect("root may");
    let bed = Bed::new("64M");
    let script = r#""$RAMET" mount "$VOLUME" "$DIR" -o io_uring"#;
    let said = |out: Output| String::from_utf8_lossy(&out.stderr).into_owned();
    let first = said(start(&bed, &["bash"], script));
    let words = "enable_uring was switched on";
    assert!(
        first.contains(words) && first.lines().count() == 1,
        "{first}"
    );
    bed.mounted().umount();
    // It is on already.
    assert_eq!(said(start(&bed, &["bash"], script)), "");
    bed.mounted().umount();
}

/// Names in backquotes in the first column of the table of `docs/stat.md`.
fn documented() -> BTreeSet<String> {
    let manual = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/stat.md");
    let manual = fs::read_to_string(manual).expect("the sources are there");
    let rows = manual.lines().filter(|line| line.starts_with("| `"));
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    let names = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    names.map(str::to_owned).collect()
}

#[test]
fn each_counter_has_a_row_in_the_documents() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let stat = mount.stat();
    let told: BTreeSet<String> = stat
        .as_object()
        .expect("one object")
        .keys()
        .cloned()
        .collect();
    let documented = documented();
    let without_row: Vec<_> = told.difference(&documented).collect();
    assert_eq!(without_row, Vec::<&String>::new());
    // Of image files only, of mounts of snapshots only, or only when something is wrong.
    let at_times = [
        "host_free_bytes",
        "host_allocated_bytes",
        "live_mount",
        "snapshot_mount",
        "poisoned",
    ];
    let missing = documented.difference(&told);
    let gone: Vec<_> = missing
        .filter(|name| !at_times.contains(&name.as_str()))
        .collect();
    assert_eq!(gone, Vec::<&String>::new());
    mount.umount();
}

#[test]
fn stat_tells_the_way_on_which_requests_come() {
    let bed = Bed::new("256M");
    let _turns = TURNS.lock();
    let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    let may_have_rings =
        rustix::process::geteuid().is_root() && disabled.is_ok_and(|text| text.trim() != "2");
    for options in ["no_io_uring", "io_uring", "defaults"] {
        let mount = bed.mount(&["-o", options]);
        let process = Path::new("/proc").join(mount.pid().as_raw_pid().to_string());
        let of = |list: &str| fs::read_dir(process.join(list)).unwrap().flatten();
        let mut threads =
            of("task").filter_map(|one| fs::read_to_string(one.path().join("comm")).ok());
        let has_rings = threads.any(|name| name.starts_with("ring-"));
        // Rings belong to these threads alone: a killed daemon must not keep one.
        let mut targets = of("fd").filter_map(|one| fs::read_link(one.path()).ok());
        assert!(!targets.any(|target| target.to_string_lossy().contains("io_uring")));
        let mappings = fs::read(process.join("maps")).unwrap();
        assert!(!String::from_utf8_lossy(&mappings).contains("io_uring"));
        let expected = if has_rings { "io_uring" } else { "/dev/fuse" };
        assert!(!has_rings || options != "no_io_uring");
        let offered = fs::read_to_string(SWITCH).is_ok_and(|text| text.trim() == "Y");
        let must_have_rings = offered && may_have_rings && options == "io_uring";
        assert!(has_rings || !must_have_rings);
        assert_eq!(mount.stat()["transport"], expected, "{options}");
        mount.umount();
    }
}

#[test]
fn mount_whose_daemon_is_killed_ends_and_leaves_the_directory() {
    const ROUNDS: u64 = 24;
    let bed = Bed::new("64M");
    let (mut failed, mut mounted) = (0, 0);
    for round in 0..ROUNDS {
        let mut starter = Command::new(ramet_bin())
            .arg("mount")
            .arg(bed.volume())
            .arg(bed.mount_point())
            .stderr(Stdio::null())
            .spawn()
            .expect("it runs");
        let start = Instant::now();
        let daemon = loop {
            // The daemon, once it runs.
            match children_of(rustix::process::Pid::from_child(&starter)).first() {
                Some(daemon) => break *daemon,
                None => assert!(start.elapsed() < PATIENCE, "no daemon"),
            }
        };
        // The kills are spread over the time that a mount takes.
        thread::sleep(Duration::from_micros(800 * round));
        // The volume is locked until the daemon has ended.
        kill_and_wait(daemon);
        let status = loop {
            match starter.try_wait().expect("it is a child") {
                Some(status) => break status,
                None => assert!(start.elapsed() < PATIENCE, "round {round}: it waits"),
            }
            thread::sleep(Duration::from_millis(1));
        };
        if status.success() {
            mounted += 1;
            let out = Command::new(ramet_bin())
                .arg("umount")
                .arg(bed.mount_point())
                .output()
                .expect("it runs");
            assert!(out.status.success(), "{out:?}");
        } else {
            failed += 1;
        }
        let listed = fs::read_dir(bed.mount_point());
        assert_eq!(listed.expect("nothing is mounted").count(), 0);
    }
    println!("{failed} mounts failed, {mounted} were done before the kill");
    assert!(failed > 0);
    // A process that the last daemon began to start has its lock until it runs.
    let start = Instant::now();
    let volume = bed.volume();
    let args = ["fsck".as_ref(), volume.as_ref()];
    while !run::<&OsStr>(ramet_bin(), &args).status.success() && start.elapsed() < PATIENCE {}
    bed.fsck();
}
