//! `mount -o ro,snapshot=NAME` of a volume that is mounted: the running daemon serves it.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ramet_e2e::{
    Bed, Mount, children_of, descriptors_of, done, force_unmount, is_mount_point, ramet_bin,
    refused, run, run_ok, text, until,
};
use rustix::fs::CWD;
use rustix::mount::{MountFlags, OpenTreeFlags, UnmountFlags, open_tree};
use rustix::process::{Pid, Signal, kill_process};

const TRANSPORTS: [&str; 2] = ["io_uring", "no_io_uring"];
const EROFS: i32 = 30;
const ENOTCONN: i32 = 107;
/// A mount of a snapshot, which goes in every case.
struct Shown(PathBuf);

impl Shown {
    fn at(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn umount(self) {
        done(&["umount", text(&self.0)]);
        assert!(!is_mount_point(&self.0));
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        if is_mount_point(&self.0) {
            force_unmount(&self.0);
        }
    }
}

/// The arguments of the command that mounts the snapshot `name` on the directory `dir` of the bed.
fn arguments(bed: &Bed, name: &str, dir: &str) -> [String; 5] {
    let at = bed.path().join(dir);
    fs::create_dir_all(&at).expect("there is room");
    let option = format!("ro,snapshot={name}");
    let [mount, o] = ["mount", "-o"].map(str::to_owned);
    [
        mount,
        o,
        option,
        text(&bed.volume()).into(),
        text(&at).into(),
    ]
}

fn show(bed: &Bed, name: &str, dir: &str) -> Shown {
    run_ok(ramet_bin(), &arguments(bed, name, dir));
    Shown(bed.path().join(dir))
}

/// A mount with the snapshot `one`.
fn begin(bed: &Bed, options: &str) -> Mount {
    bed.mount_with_snapshot(options, 0o666)
}

fn snapshot_mounts(mount: &Mount) -> usize {
    let stat = mount.stat();
    stat["snapshot_mounts"].as_array().expect("a list").len()
}

#[test]
fn a_snapshot_is_mounted_beside_its_volume_exactly() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = begin(&bed, transport);
        let live = mount.root().join("file");
        let then = fs::metadata(&live).expect("it is there");
        let shown = show(&bed, "one", "then");
        for round in 0..50 {
            fs::write(&live, format!("later {round}")).expect("there is room");
            fs::write(mount.root().join(format!("new{round}")), "x").expect("there is room");
            let told = fs::read_to_string(shown.at("file")).expect("it is there");
            assert_eq!(told, "before");
        }
        fs::remove_dir(mount.root().join("dir")).expect("it is empty");
        let listed = run_ok("ls", &["-A", text(&shown.0)]);
        assert_eq!(listed, "dir\nfile\nlink\n", "no reserved name either");
        let found = fs::metadata(shown.at("file")).expect("it is there");
        // A view below `.ramet` has other numbers and modes.
        assert_eq!(found.ino(), then.ino());
        assert_eq!(found.mode(), then.mode());
        assert_eq!(found.mtime_nsec(), then.mtime_nsec());
        assert_ne!(found.dev(), then.dev());
        // The whole volume reads the same in both.
        let view = mount.root().join(".ramet/snapshots/one");
        run_ok("diff", &["-r", text(&view), text(&shown.0)]);
        let own: serde_json::Value =
            serde_json::from_str(&done(&["stat", "--json", text(&shown.0)])).expect("JSON");
        assert!(own["live_mount"].is_string(), "{own}");
        assert_eq!(snapshot_mounts(&mount), 1);
        shown.umount();
        assert_eq!(snapshot_mounts(&mount), 0);
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn every_change_beside_is_refused_and_loses_nothing() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/views.py");
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = begin(&bed, transport);
        let shown = show(&bed, "one", "then");
        let top = text(&shown.0).to_owned();
        let before = run_ok("find", &[&top, "-ls"]);
        assert_eq!(run_ok("python3", &[script, &top]), "25 changes tried\n");
        assert_eq!(run_ok("find", &[&top, "-ls"]), before);
        if rustix::process::geteuid().is_root() {
            // The kernel then opens files without the daemon, and asks it for each change.
            rustix::mount::mount_remount(&top, MountFlags::empty(), "").expect("root may");
            let told = run_ok("python3", &[script, &top]);
            let done = told.lines().filter(|line| !line.starts_with("open for "));
            assert_eq!(done.collect::<Vec<_>>(), ["25 changes tried"]);
            assert_eq!(run_ok("find", &[&top, "-ls"]), before);
            let again = show(&bed, "one", "again");
            let told = fs::read_to_string(again.at("file")).expect("it is there");
            assert_eq!(told, "before");
            again.umount();
        }
        // The calls of Ramet as well, those among them that would change the volume.
        for args in [
            &["rm", &format!("{top}/dir")][..],
            &["clone", &format!("{top}/file"), &format!("{top}/x")],
            &["snapshot", "create", &top, "two"],
            &["snapshot", "policy", &top, "daily=1"],
            &["sync", "--checkpoint", &top],
            &["grow", "--size", "512M", &top],
        ] {
            refused(args);
        }
        assert_eq!(mount.stat()["snapshots"], 1);
        for name in ["file", "link"] {
            let live = fs::read_to_string(mount.root().join(name)).expect("it is there");
            assert_eq!(live, "before");
        }
        shown.umount();
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn a_mounted_snapshot_is_not_removed_until_it_is_unmounted() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = begin(&bed, transport);
        let root = text(mount.root()).to_owned();
        let (shown, again) = (show(&bed, "one", "then"), show(&bed, "one", "again"));
        assert!(refused(&["snapshot", "rm", &root, "one"]).contains("it is mounted"));
        let told = fs::read_to_string(shown.at("file")).expect("it is there");
        assert_eq!(told, "before");
        shown.umount();
        assert!(refused(&["snapshot", "rm", &root, "one"]).contains("it is mounted"));
        // By umount(8) alone, after which the daemon needs a moment.
        run_ok("umount", &["-i", text(&again.0)]);
        until("the daemon gives it up", || snapshot_mounts(&mount) == 0);
        done(&["snapshot", "rm", &root, "one"]);
        let missing = run(ramet_bin(), &arguments(&bed, "one", "then"));
        let why = String::from_utf8_lossy(&missing.stderr);
        assert!(why.contains("there is no snapshot \"one\""), "{why}");
        assert!(!is_mount_point(&bed.path().join("then")), "nothing is left");
        assert_eq!(snapshot_mounts(&mount), 0);
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn the_volume_is_unmounted_after_its_snapshots_or_ends_them() {
    // By the command, by umount(8) without its helper, lazily, and by a signal.
    for (way, transport) in (0..4).flat_map(|way| TRANSPORTS.map(|transport| (way, transport))) {
        let bed = Bed::new("256M");
        let mount = begin(&bed, transport);
        let (used, idle) = (show(&bed, "one", "then"), show(&bed, "one", "idle"));
        let root = text(mount.root()).to_owned();
        fs::write(mount.root().join("file"), "later").expect("there is room");
        let mut program = Command::new("sleep")
            .arg("60")
            .current_dir(&used.0)
            .stdin(Stdio::null())
            .spawn()
            .expect("it is there");
        let file = fs::File::open(used.at("file")).expect("it is there");
        match way {
            0 => {
                let why = refused(&["umount", &root]);
                assert!(why.contains("a snapshot of it is mounted on"), "{why}");
                assert!(why.contains(text(&used.0)), "{why}");
                let told = fs::read_to_string(used.at("file")).expect("it is there");
                assert_eq!(told, "before");
                program.kill().expect("it is a child");
                program.wait().expect("it is a child");
                drop(file);
                used.umount();
                idle.umount();
                mount.umount();
                bed.fsck();
                continue;
            }
            1 => drop(run_ok("umount", &["-i", &root])),
            2 => drop(run_ok("umount", &["-i", "-l", &root])),
            _ => kill_process(mount.pid(), Signal::TERM).expect("it runs"),
        }
        let pid = mount.pid().as_raw_pid();
        let process = format!("/proc/{pid}/task/{pid}/comm");
        until("the daemon ends", || fs::read(&process).is_err());
        assert!(!is_mount_point(&used.0) && !is_mount_point(&idle.0));
        let gone = fs::metadata(format!("/proc/{}/cwd/file", program.id()));
        let gone = gone.expect_err("its daemon is gone").raw_os_error();
        assert!(matches!(gone, Some(ENOTCONN | 103)), "{gone:?}");
        program.kill().expect("it is a child");
        program.wait().expect("it is a child");
        drop((file, mount));
        bed.fsck();
        // Durable to the last.
        let mount = bed.mount(&[]);
        let told = fs::read_to_string(mount.root().join("file")).expect("it is there");
        assert_eq!(told, "later");
        mount.umount();
    }
}

#[test]
fn a_snapshot_within_its_volume_goes_before_it_unless_it_is_in_use() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: fusermount3 sees nothing within a mount for its user alone");
        return;
    }
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = begin(&bed, transport);
        let inside = mount.root().join("dir");
        let options = "ro,snapshot=one";
        done(&["mount", "-o", options, text(&bed.volume()), text(&inside)]);
        let file = fs::File::open(inside.join("file")).expect("it is there");
        kill_process(mount.pid(), Signal::TERM).expect("it runs");
        let log = bed.path().join("daemon.log");
        until("the daemon tells why it stays", || {
            fs::read_to_string(&log).is_ok_and(|log| log.contains("cannot unmount"))
        });
        assert!(is_mount_point(&inside) && is_mount_point(mount.root()));
        drop(file);
        // The same signal ends the daemon now.
        let daemon = format!("/proc/{}", mount.pid().as_raw_pid());
        until("the daemon ends", || !Path::new(&daemon).exists());
        assert!(!is_mount_point(&inside) && !is_mount_point(&bed.mount_point()));
        bed.fsck();
    }
}

#[test]
fn a_snapshot_goes_with_its_volume_after_a_rename_of_its_directory() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: fusermount3 sees nothing within a mount for its user alone");
        return;
    }
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = begin(&bed, transport);
        let at = |name: &str| mount.root().join("dir").join(name);
        fs::create_dir_all(at("a/then")).expect("there is room");
        let (volume, within) = (bed.volume(), at("a/then"));
        done(&[
            "mount",
            "-o",
            "ro,snapshot=one",
            text(&volume),
            text(&within),
        ]);
        fs::rename(at("a"), at("b")).expect("no mount point of its own");
        let _outside = show(&bed, "one", "outside/then");
        let moved = Shown(bed.path().join("moved/then"));
        fs::rename(bed.path().join("outside"), bed.path().join("moved")).expect("as above");
        assert!(is_mount_point(&at("b/then")) && is_mount_point(&moved.0));
        mount.terminate();
        assert!(!is_mount_point(&bed.mount_point()) && !is_mount_point(&moved.0));
        bed.fsck();
    }
}

#[test]
fn a_snapshot_on_which_another_mount_is_made_meanwhile_is_served() {
    const USER: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        println!("not root: no other mount");
        return;
    }
    let (bed, bin) = Bed::of_user(USER);
    let (ramet, at) = (text(&bin), |name: &str| bed.path().join(name));
    // The program that mounts for the command comes back when the other mount stands.
    let script = format!(
        "mkdir then slow; {ramet} mkfs --size 256M volume.ramet; {ramet} mount volume.ramet mnt
         echo before > mnt/file; {ramet} snapshot create mnt one; echo later > mnt/file
         cat > slow/fusermount3 <<END\n#!/bin/sh\n$(command -v fusermount3) \"\\$@\" || exit 1
         touch made; while ! test -e covered; do sleep 0.01; done\nEND
         chmod +x slow/fusermount3
         PATH=$PWD/slow:$PATH {ramet} mount -o ro,snapshot=one volume.ramet then && echo served ||:
         touch ended; while ! test -e seen; do sleep 0.01; done
         cat then/file; {ramet} umount then; {ramet} snapshot rm mnt one; {ramet} umount mnt"
    );
    let shown = Shown(at("then"));
    let (lines, said) = std::thread::scope(|threads| {
        let script = threads.spawn(|| bed.script_of(USER, &script));
        until("the mount is made", || at("made").exists());
        let none = MountFlags::empty();
        rustix::mount::mount("none", &shown.0, "tmpfs", none, None).expect("root may");
        fs::write(at("covered"), "").expect("there is room");
        until("the command ends", || at("ended").exists());
        rustix::mount::unmount(&shown.0, UnmountFlags::DETACH).expect("it is mounted");
        fs::write(at("seen"), "").expect("there is room");
        script.join().expect("it does not panic")
    });
    assert_eq!(lines, ["served", "before"], "{said}");
    assert!(!is_mount_point(&shown.0));
}

#[test]
fn a_snapshot_of_a_volume_that_is_being_mounted_is_mounted_as_soon_as_that_is() {
    let bed = Bed::new("256M");
    begin(&bed, "no_io_uring").umount();
    for _ in 0..20 {
        let mut volume = Command::new(ramet_bin());
        volume.args(["mount", text(&bed.volume()), text(&bed.mount_point())]);
        volume.stdin(Stdio::null()).stdout(Stdio::null());
        let mut volume = volume.spawn().expect("it is there");
        // It ends when the mount is usable, or if it fails.
        let mut is_done = || volume.try_wait().expect("it is a child").is_some();
        while !is_mount_point(&bed.mount_point()) && !is_done() {}
        let out = start(&bed, "then").wait_with_output();
        let out = out.expect("it is a child");
        assert!(volume.wait().expect("it is a child").success());
        let mount = bed.mounted();
        let shown = Shown(bed.path().join("then"));
        assert!(out.status.success(), "{out:?}");
        assert_eq!(snapshot_mounts(&mount), 1);
        shown.umount();
        mount.umount();
    }
}

#[test]
fn a_killed_daemon_leaves_a_mount_that_does_not_hang() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = begin(&bed, transport);
        let shown = show(&bed, "one", "then");
        kill_process(mount.pid(), Signal::KILL).expect("it runs");
        until("the mount is dead", || {
            let looked = fs::metadata(shown.at("file"));
            looked.is_err_and(|error| error.raw_os_error() == Some(ENOTCONN))
        });
        shown.umount();
        mount.detach_dead();
        let volume = bed.volume();
        until("the volume is free and clean", || {
            run(ramet_bin(), &["fsck", "--files", text(&volume)])
                .status
                .success()
        });
    }
}

#[test]
fn requests_to_a_snapshot_of_a_killed_daemon_fail_while_its_descriptors_are_held() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = begin(&bed, transport);
        let (gone, shown) = (show(&bed, "one", "gone"), show(&bed, "one", "then"));
        gone.umount();
        // Its end of the socket to the watcher too.
        let held = descriptors_of(mount.pid());
        mount.kill_daemon();
        for top in [mount.root(), &shown.0] {
            let out = run(
                "timeout",
                &["--signal=KILL", "20", "stat", text(&top.join("any"))],
            );
            // `stat` tells an error by 1.
            assert_eq!(out.status.code(), Some(1), "{out:?}");
        }
        drop(held);
        shown.umount();
        mount.detach_dead();
        bed.fsck();
    }
}

/// The process that ends the mounts of a daemon that is killed.
fn watcher_of(daemon: Pid) -> PathBuf {
    let watcher = children_of(daemon)[0];
    Path::new("/proc").join(watcher.as_raw_pid().to_string())
}

#[test]
fn a_mount_that_takes_place_and_number_of_a_volume_that_ends_lives_on() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: umount(2) is not called without fusermount3");
        return;
    }
    for options in ["no_io_uring", "no_io_uring,auto_unmount"] {
        // Other tests take numbers too.
        let is_same = (0..100).any(|_| another_takes_the_place(options));
        assert!(is_same, "no number was given again");
    }
}

/// Has a daemon learn of the end of its mount when another one stands in its place, which must live
/// on. Answers whether that has the same number.
fn another_takes_the_place(options: &str) -> bool {
    let (bed, other) = (Bed::new("256M"), Bed::new("256M"));
    let mount = begin(&bed, options);
    let number = fs::metadata(mount.root()).expect("it is mounted").dev();
    let (dir, daemon) = (text(mount.root()).to_owned(), mount.pid());
    let watcher = watcher_of(daemon);
    kill_process(daemon, Signal::STOP).expect("it runs");
    rustix::mount::unmount(&dir, UnmountFlags::empty()).expect("it is idle");
    done(&["mount", text(&other.volume()), &dir]);
    let later = bed.mounted();
    let is_same = fs::metadata(&dir).expect("it is mounted").dev() == number;
    kill_process(daemon, Signal::CONT).expect("it runs");
    until("the watcher ends", || !watcher.exists());
    until("the daemon ends", || {
        !Path::new(&format!("/proc/{}", daemon.as_raw_pid())).exists()
    });
    mount.is_unmounted();
    fs::write(later.root().join("file"), "x").expect("it lives");
    later.umount();
    bed.fsck();
    is_same
}

#[test]
fn a_mount_of_a_user_that_takes_place_and_number_of_one_that_ends_lives_on() {
    const USER: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        println!("not root: no mount namespace");
        return;
    }
    // Where `fusectl` is not mounted, the kernel shows no connection to an ordinary user. The daemon
    // of the first mount learns of its end when the other one stands, and then ends by itself or is
    // killed.
    for (options, signal) in [("", ""), ("-o auto_unmount", ""), ("-o auto_unmount", "-9")] {
        let (bed, ramet) = Bed::of_user(USER);
        let script = format!(
            "cd {dir}; ramet={ramet}; export TMPDIR=$PWD; $ramet mkfs --size 256M a
             $ramet mkfs --size 256M b
             for round in $(seq 100); do
               $ramet mount {options} a mnt; number=$(stat -c %d mnt)
               pid=$($ramet stat --json mnt | grep -o '\"pid\": *[0-9]*' | grep -o '[0-9]*$')
               watcher=$(cut -d' ' -f1 /proc/$pid/task/$pid/children)
               kill -STOP $pid; fusermount3 -u mnt; $ramet mount b mnt
               same=$(stat -c %d mnt)
               test -z '{signal}' || kill {signal} $pid; kill -CONT $pid || true
               while test -e /proc/$pid/exe -o -e /proc/$watcher/exe; do sleep 0.01; done
               echo x > mnt/file; $ramet umount mnt
               if test $same = $number; then echo again; exit; fi
             done",
            dir = text(bed.path()),
            ramet = text(&ramet),
        );
        let ids = "setpriv --reuid=65534 --regid=65534 --clear-groups sh -ec \"$1\"";
        let unseen = "while umount /sys/fs/fuse/connections 2>/dev/null; do :; done";
        let namespace = format!("{unseen}; {ids}");
        let args = ["--mount", "sh", "-c", &namespace, "sh", &script];
        let said = run_ok("unshare", &args);
        assert_eq!(
            said.lines().last(),
            Some("again"),
            "{options} {signal}: {said}"
        );
    }
}

#[test]
fn mounts_come_and_go_without_end_and_leave_nothing() {
    let bed = Bed::new("256M");
    let mount = begin(&bed, "no_io_uring,views=none");
    let open = || {
        let all = fs::read_dir(format!("/proc/{}/fd", mount.pid().as_raw_pid()));
        all.expect("it runs").count()
    };
    let requests = || mount.stat()["memory_requests_bytes"].as_u64();
    // The daemon closes its last descriptor of a mount a moment after the mount.
    let mut before = (open(), requests());
    for _ in 0..20 {
        let shown = show(&bed, "one", "then");
        let told = fs::read_to_string(shown.at("file")).expect("it is there");
        assert_eq!(told, "before");
        shown.umount();
        before = before.min((open(), requests()));
    }
    until("descriptors and memory come back", || {
        (open(), requests()) <= before
    });
    mount.umount();
}

/// Starts a command that mounts the snapshot `one` on the directory `dir` of the bed.
fn start(bed: &Bed, dir: &str) -> Child {
    let mut command = Command::new(ramet_bin());
    command
        .args(arguments(bed, "one", dir))
        .stdin(Stdio::null());
    let piped = command.stdout(Stdio::null()).stderr(Stdio::piped());
    piped.spawn().expect("it is there")
}

#[test]
fn as_many_snapshots_are_mounted_at_once_as_the_memory_has_room_for() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = begin(&bed, &format!("{transport},memory=512M"));
        let names: Vec<_> = (0..12).map(|number| format!("many{number}")).collect();
        let started: Vec<_> = names.iter().map(|name| start(&bed, name)).collect();
        let mut all = Vec::new();
        for (name, child) in names.iter().zip(started) {
            let out = child.wait_with_output().expect("it is a child");
            if out.status.success() {
                all.push(Shown(bed.path().join(name)));
                continue;
            }
            let why = String::from_utf8_lossy(&out.stderr);
            assert!(why.contains("as many mounts of snapshots"), "{why}");
            assert!(!is_mount_point(&bed.path().join(name)), "nothing is left");
        }
        // Four buffers of 1 MiB and 4 KiB each, in a sixteenth.
        assert_eq!(all.len(), 7);
        assert_eq!(snapshot_mounts(&mount), 7);
        all.into_iter().for_each(Shown::umount);
        show(&bed, "one", "then").umount();
        mount.umount();
    }
}

#[test]
fn of_commands_that_mount_on_one_directory_at_once_one_succeeds() {
    let bed = Bed::new("256M");
    let mount = begin(&bed, "io_uring");
    for _ in 0..3 {
        let started: Vec<_> = (0..6).map(|_| start(&bed, "then")).collect();
        let ended = started.into_iter().map(|child| {
            let out = child.wait_with_output().expect("it is a child");
            let why = String::from_utf8_lossy(&out.stderr).into_owned();
            assert!(
                out.status.success() || why.contains("already mounted"),
                "{why}"
            );
            out.status.success()
        });
        assert_eq!(ended.filter(|success| *success).count(), 1);
        assert_eq!(snapshot_mounts(&mount), 1);
        // Nothing lies below.
        Shown(bed.path().join("then")).umount();
        assert_eq!(snapshot_mounts(&mount), 0);
    }
    mount.umount();
}

#[test]
fn other_mounts_with_the_source_of_the_volume_are_not_asked() {
    const USER: u32 = 65534;
    let bed = Bed::new("256M");
    // That of a daemon that was killed, on another directory.
    let dead = bed.path().join("dead");
    fs::create_dir(&dead).expect("the folder is new");
    done(&["mount", text(&bed.volume()), text(&dead)]);
    let stat: serde_json::Value =
        serde_json::from_str(&done(&["stat", "--json", text(&dead)])).expect("JSON");
    let pid = stat["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
    ramet_e2e::kill_and_wait(pid.and_then(Pid::from_raw).expect("a process"));
    let _dead = Shown(dead);
    // That of another user, which root may not look into.
    let other = Bed::without_volume();
    let foreign = Shown(other.mount_point());
    if rustix::process::geteuid().is_root() {
        other.hand_to(USER, USER);
        let ramet = other.command_for_others();
        let script = format!(
            "{ramet} mkfs --size 256M {volume}
             {ramet} mount -o fsname={source} {volume} {dir}",
            ramet = text(&ramet),
            volume = text(&other.volume()),
            source = text(&bed.volume()),
            dir = text(&other.mount_point()),
        );
        let ids = [
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "sh",
            "-ec",
        ];
        run_ok("setpriv", &[&ids[..], &[&script]].concat());
        assert!(is_mount_point(&foreign.0));
    }
    let mount = begin(&bed, "no_io_uring");
    let shown = show(&bed, "one", "then");
    assert_eq!(snapshot_mounts(&mount), 1);
    shown.umount();
    mount.umount();
}

#[test]
fn a_snapshot_of_which_there_is_an_unseen_mount_is_not_told_as_unmounted() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: no mount without a place");
        return;
    }
    let bed = Bed::new("256M");
    let mount = begin(&bed, "no_io_uring");
    let shown = show(&bed, "one", "then");
    // A mount namespace of its own would keep the mounts of other tests too.
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let copy = open_tree(CWD, &shown.0, flags).expect("root may");
    let why = refused(&["umount", text(&shown.0)]);
    assert!(why.contains("still serves it"), "{why}");
    assert!(!is_mount_point(&shown.0));
    assert_eq!(snapshot_mounts(&mount), 1);
    let root = text(mount.root()).to_owned();
    assert!(refused(&["snapshot", "rm", &root, "one"]).contains("it is mounted"));
    drop(copy);
    until("the daemon gives it up", || snapshot_mounts(&mount) == 0);
    done(&["snapshot", "rm", &root, "one"]);
    mount.umount();
}

#[test]
fn the_daemon_is_asked_in_any_place_of_its_volume() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: no bound mount");
        return;
    }
    let bed = Bed::new("256M");
    let mount = begin(&bed, "no_io_uring");
    let shown = show(&bed, "one", "then");
    let (file, dir) = (bed.path().join("bound"), bed.path().join("place"));
    fs::write(&file, "").expect("there is room");
    fs::create_dir(&dir).expect("there is room");
    let live = mount.root().to_owned();
    rustix::mount::mount_bind(live.join("file"), &file).expect("root may");
    let file = Shown(file);
    rustix::mount::mount_bind(&live, &dir).expect("root may");
    let place = Shown(dir);
    // The file comes first in the list of mounts.
    rustix::mount::unmount(&live, UnmountFlags::DETACH).expect("root may");
    let out = run(ramet_bin(), &["umount", text(&shown.0)]);
    assert!(out.status.success() && out.stderr.is_empty(), "{out:?}");
    rustix::mount::unmount(&file.0, UnmountFlags::empty()).expect("it is idle");
    rustix::mount::mount_bind(&place.0, &live).expect("root may");
    rustix::mount::unmount(&place.0, UnmountFlags::empty()).expect("it is idle");
    mount.umount();
    bed.fsck();
}

#[test]
fn a_process_of_another_pid_namespace_is_refused() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: no pid namespace");
        return;
    }
    let bed = Bed::new("256M");
    let mount = begin(&bed, "no_io_uring");
    let args = arguments(&bed, "one", "then");
    let command = ["--pid", "--fork", text(ramet_bin())];
    let command = command.into_iter().chain(args.iter().map(String::as_str));
    let out = run("unshare", &command.collect::<Vec<_>>());
    let why = String::from_utf8_lossy(&out.stderr);
    assert!(why.contains("another process namespace"), "{why}");
    assert!(!is_mount_point(&bed.path().join("then")));
    assert_eq!(snapshot_mounts(&mount), 0);
    mount.umount();
}

#[test]
fn root_does_not_end_a_snapshot_by_an_unmount_of_a_volume_of_another_user() {
    const USER: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        println!("not root: no other user");
        return;
    }
    let (bed, ramet) = Bed::of_user(USER);
    let script = format!(
        "cd {dir}; mkdir then; {ramet} mkfs --size 256M volume.ramet
         {ramet} mount volume.ramet mnt; {ramet} snapshot create mnt one
         {ramet} mount -o ro,snapshot=one volume.ramet then",
        dir = text(bed.path()),
        ramet = text(&ramet),
    );
    let ids = [
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "sh",
        "-ec",
    ];
    run_ok("setpriv", &[&ids[..], &[&script]].concat());
    let (live, shown) = (Shown(bed.mount_point()), Shown(bed.path().join("then")));
    let why = refused(&["umount", text(&live.0)]);
    assert!(why.contains("a snapshot of it is mounted on"), "{why}");
    assert!(is_mount_point(&live.0) && is_mount_point(&shown.0));
    shown.umount();
    live.umount();
    bed.fsck();
}

#[test]
fn only_root_and_the_user_of_the_volume_mount_its_snapshots() {
    const USER: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        println!("not root: every other test of this run is already one by an ordinary user");
        return;
    }
    let (bed, bin) = Bed::of_user(USER);
    let ramet = text(&bin);
    let script = format!(
        "mkdir then; {ramet} mkfs --size 1G volume.ramet; {ramet} mount volume.ramet mnt
         echo before > mnt/file; {ramet} snapshot create mnt one; echo later > mnt/file
         {ramet} mount -o ro,snapshot=one volume.ramet then; cat then/file
         refused touch then/file; refused {ramet} snapshot rm mnt one; refused {ramet} umount mnt
         {ramet} umount then; {ramet} snapshot rm mnt one
         {ramet} umount mnt; {ramet} fsck volume.ramet >/dev/null; echo end"
    );
    let shown = Shown(bed.path().join("then"));
    let (lines, said) = bed.script_of(USER, &script);
    drop(shown);
    assert_eq!(lines, ["before", "end"], "{said}");
    // A user that may use a mount of root, and no more.
    let bed = Bed::new("256M");
    bed.command_for_others();
    let mount = begin(&bed, "no_io_uring");
    bed.hand_to(USER, USER);
    fs::create_dir(bed.path().join("then")).expect("there is room");
    std::os::unix::fs::chown(bed.path().join("then"), Some(USER), Some(USER)).expect("root may");
    fs::set_permissions(bed.volume(), fs::Permissions::from_mode(0o666)).expect("ours");
    let ids = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let args = arguments(&bed, "one", "then");
    let bin = text(&bed.path().join("ramet")).to_owned();
    let args = ids
        .into_iter()
        .chain([&*bin])
        .chain(args.iter().map(|arg| &**arg));
    let out = run("setpriv", &args.collect::<Vec<_>>());
    let why = String::from_utf8_lossy(&out.stderr);
    assert!(why.contains("only root and the user"), "{why}");
    assert!(!is_mount_point(&bed.path().join("then")));
    mount.umount();
}

#[test]
fn mount_8_and_a_volume_without_views_show_snapshots_too() {
    let bed = Bed::new("256M");
    let mount = begin(&bed, "no_io_uring,views=none");
    let shown = show(&bed, "one", "then");
    // The same place twice.
    let args = arguments(&bed, "one", "then");
    assert!(!run(ramet_bin(), &args).status.success());
    let error = fs::write(shown.at("file"), "x").expect_err("a snapshot");
    assert_eq!(error.raw_os_error(), Some(EROFS));
    // Options of the daemon that do not fit.
    let volume = bed.volume();
    let dir = bed.path().join("other");
    fs::create_dir(&dir).expect("there is room");
    let auto = "ro,snapshot=one,auto_unmount";
    let why = refused(&["mount", "-o", auto, text(&volume), text(&dir)]);
    assert!(why.contains("auto_unmount"), "{why}");
    let options = "ro,snapshot=one";
    let args = [
        "mount",
        "--foreground",
        "-o",
        options,
        text(&volume),
        text(&dir),
    ];
    let why = refused(&args);
    assert!(
        why.contains("--foreground") && !is_mount_point(&dir),
        "{why}"
    );
    let options = "ro,snapshot=one,memory=1G,threads=2";
    let args = ["mount", "-o", options, text(&volume), text(&dir)];
    let said = run(ramet_bin(), &args);
    let note = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(
        said.status.success() && note.contains("memory, threads: without effect"),
        "{note}"
    );
    Shown(dir.clone()).umount();
    assert!(refused(&["mount", "-o", "snapshot=one", text(&volume), text(&dir)]).contains("'ro'"));
    // A directory of the mount itself is a mount point as well.
    let inside = mount.root().join("dir");
    let options = "ro,snapshot=one";
    done(&["mount", "-o", options, text(&volume), text(&inside)]);
    let told = fs::read_to_string(inside.join("file")).expect("it is there");
    assert_eq!(told, "before");
    assert!(Path::new(&inside).join("dir").is_dir());
    done(&["umount", text(&inside)]);
    shown.umount();
    mount.umount();
    bed.fsck();
}
