//! A daemon depends on nothing of the process that started it.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use ramet_e2e::{Bed, Mount, ramet_bin};

/// `nobody`, which every Debian has.
const USER: u32 = 65534;

/// Mounts the volume from a program: `sh` or `python3`, whose `script` runs `$RAMET mount $VOLUME $DIR` in some way.
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
