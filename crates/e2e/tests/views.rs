//! Snapshots of a mounted volume, looked into by way of `.ramet/snapshots`, on both transports.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ramet_e2e::{Bed, Mount, done, force_unmount, ramet_bin, refused, run, run_ok, text, until};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, Signal, kill_process, pidfd_open};

const TRANSPORTS: [&str; 2] = ["io_uring", "no_io_uring"];
/// Errors of paths into a view.
const ESTALE: i32 = 116;
const ENOTCONN: i32 = 107;
/// How long daemon, kernel and watcher may take for steps of their own.
const PATIENCE: Duration = Duration::from_secs(60);

fn snapshots(mount: &Mount) -> PathBuf {
    mount.root().join(".ramet/snapshots")
}

/// The mount points of views of this volume.
fn mounts_of_views(bed: &Bed) -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("there is a /proc");
    let volume = bed.volume().canonicalize().expect("the volume is there");
    // The list has a number in the place of `#`.
    let source = format!("{}\\043snapshots", volume.display());
    let fields = mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>());
    let of_views = fields.filter(|f| f[2] == "fuse.ramet-views" && f[0] == source);
    of_views.map(|fields| fields[1].into()).collect()
}

/// A mount with the snapshot `one`.
fn begin(bed: &Bed, options: &str) -> Mount {
    bed.mount_with_snapshot(options, 0o6777)
}

#[test]
fn a_view_shows_the_moment_while_the_volume_changes() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = begin(&bed, transport);
        let (at, then) = (|name: &str| mount.root().join(name), snapshots(&mount));
        let number = fs::metadata(at("file")).expect("it is there").ino();
        for round in 0..50 {
            fs::write(at("file"), format!("later {round}")).expect("there is room");
            fs::write(at(&format!("new{round}")), "x").expect("there is room");
            let shown = fs::read_to_string(then.join("one/file")).expect("it is there");
            assert_eq!(shown, "before");
        }
        fs::remove_dir(at("dir")).expect("it is empty");
        let list = |dir: PathBuf| {
            let mut names: Vec<_> = fs::read_dir(dir)
                .expect("it is a directory")
                .map(|entry| entry.expect("it is listed").file_name())
                .collect();
            names.sort();
            names
        };
        assert_eq!(list(then.join("one")), ["dir", "file", "link"]);
        assert_eq!(list(then.clone()), ["one"]);
        let shown = fs::metadata(then.join("one/file")).expect("it is there");
        assert_eq!(shown.mode() & 0o7777, 0o555, "no write and set-id bits");
        assert_eq!((shown.ino() - (1 << 52)) & 0xffff_ffff, number);
        assert!(shown.ino() < 1 << 53);
        let top = fs::metadata(&then).expect("it is there");
        assert_eq!(top.ino(), 1 << 52);
        let live = fs::metadata(at("file")).expect("it is there");
        assert_ne!(shown.dev(), live.dev());
        let link = fs::read_link(then.join("one/link")).expect("it is there");
        assert_eq!(link, Path::new("file"));
        let value = run_ok(
            "getfattr",
            &[
                "--only-values",
                "-n",
                "user.old",
                text(&then.join("one/file")),
            ],
        );
        assert_eq!(value, "x");
        // A second snapshot has other numbers for the same inodes.
        done(&["snapshot", "create", text(mount.root()), "two"]);
        let other = fs::metadata(then.join("two/file")).expect("it is there");
        assert_eq!(other.ino() & 0xffff_ffff, shown.ino() & 0xffff_ffff);
        assert_ne!(other.ino(), shown.ino());
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn every_change_below_a_view_is_refused_and_loses_nothing() {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/views.py");
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let others = bed.command_for_others();
        let mount = begin(&bed, &format!("{transport},views=all"));
        let top = snapshots(&mount).join("one");
        let before = run_ok("find", &[text(&top), "-ls"]);
        assert_eq!(
            run_ok("python3", &[script, text(&top)]),
            "25 changes tried\n"
        );
        let script_of_user = others.with_file_name("views.py");
        fs::copy(script, &script_of_user).expect("there is room");
        let as_user = [
            "--reuid=1234",
            "--regid=1234",
            "--clear-groups",
            "/usr/bin/python3",
        ];
        let args = [&as_user[..], &[text(&script_of_user), text(&top)]].concat();
        let said = run_ok("setpriv", &args);
        let odd = said.lines().filter(|line| {
            !line.ends_with("tried") && !line.ends_with("EACCES") && !line.ends_with("EPERM")
        });
        assert_eq!(odd.collect::<Vec<_>>(), [""; 0], "{said}");
        assert_eq!(run_ok("find", &[text(&top), "-ls"]), before);
        for (name, content) in [("file", "before"), ("link", "before")] {
            let live = fs::read_to_string(mount.root().join(name)).expect("it is there");
            assert_eq!(live, content);
        }
        // The calls of Ramet as well.
        assert!(refused(&["rm", text(&top.join("dir"))]).contains("ead-only"));
        assert!(
            !run(ramet_bin(), &["clone", text(&top), text(&top.join("x"))])
                .status
                .success()
        );
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn programs_that_walk_the_volume_do_not_enter() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = begin(&bed, transport);
        let root = text(mount.root()).to_owned();
        // Known to the kernel, and mounted.
        assert!(snapshots(&mount).join("one/file").exists());
        let found = run_ok("find", &[&root, "-mindepth", "1", "-printf", "%P\n"]);
        let mut found: Vec<_> = found.lines().collect();
        found.sort_unstable();
        assert_eq!(found, ["dir", "file", "link"]);
        let tar = bed.path().join("all.tar");
        run_ok("tar", &["-C", &root, "-cf", text(&tar), "."]);
        let listed = run_ok("tar", &["-tf", text(&tar)]);
        assert!(
            !listed.contains("ramet") && listed.contains("./file"),
            "{listed}"
        );
        let copy = bed.path().join("copy");
        run_ok("cp", &["-a", &root, text(&copy)]);
        assert!(copy.join("file").exists() && !copy.join(".ramet").exists());
        // A clone of the root has none of it either, and there the name is free.
        done(&["clone", &root, &format!("{root}/clone")]);
        fs::create_dir(mount.root().join("clone/.ramet")).expect("it is no root");
        fs::remove_dir(mount.root().join("clone/.ramet")).expect("it is empty");
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn the_reserved_name_is_given_to_no_entry() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = begin(&bed, transport);
        let root = text(mount.root()).to_owned();
        let name = mount.root().join(".ramet");
        let errno = |result: std::io::Result<()>| {
            result
                .expect_err("it is refused")
                .raw_os_error()
                .expect("by the kernel")
        };
        let (eperm, eexist, eisdir, erofs) = (1, 17, 21, 30);
        let at = |name: &str| mount.root().join(name);
        for looked_up in [false, true] {
            if looked_up {
                assert!(fs::metadata(&name).expect("it is there").is_dir());
            }
            assert_eq!(errno(fs::create_dir(&name)), eexist);
            assert_eq!(errno(fs::write(&name, "x")), eisdir);
            assert_eq!(errno(fs::hard_link(at("file"), &name)), eexist);
            assert_eq!(errno(fs::rename(at("file"), &name)), eisdir);
            assert_eq!(errno(fs::rename(at("dir"), &name)), eperm);
            assert_eq!(errno(fs::rename(&name, at("x"))), eperm);
            assert_eq!(errno(fs::remove_dir(&name)), eperm);
            assert_eq!(errno(fs::create_dir(name.join("x"))), erofs);
            assert_eq!(errno(fs::rename(at("file"), name.join("x"))), erofs);
            assert_eq!(errno(fs::remove_file(name.join("snapshots"))), erofs);
            let open = fs::Permissions::from_mode(0o777);
            assert_eq!(errno(fs::set_permissions(&name, open)), erofs);
        }
        let target = format!("{root}/.ramet");
        refused(&["clone", &format!("{root}/dir"), &target]);
        refused(&["clone", "--replace", &format!("{root}/dir"), &target]);
        refused(&[
            "restore",
            "--at",
            "one",
            "--replace",
            &format!("{root}/dir"),
            &target,
        ]);
        refused(&["rm", &target]);
        assert!(at("dir").is_dir() && at("file").exists());
        assert_eq!(
            fs::read_to_string(at("file")).expect("it is there"),
            "before"
        );
        mount.umount();
        let mount = bed.mount(&["-o", &format!("{transport},views=none")]);
        assert!(!name.exists(), "views=none");
        assert_eq!(errno(fs::create_dir(&name)), eperm);
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn a_clone_out_of_a_view_is_an_ordinary_one() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = begin(&bed, transport);
        let root = text(mount.root()).to_owned();
        fs::write(mount.root().join("file"), "later").expect("there is room");
        let view = text(&snapshots(&mount)).to_owned();
        done(&[
            "clone",
            &format!("{view}/one/file"),
            &format!("{root}/copy"),
        ]);
        let copy = fs::read_to_string(mount.root().join("copy")).expect("it is there");
        assert_eq!(copy, "before");
        fs::write(mount.root().join("copy"), "changed").expect("it is a file of today");
        done(&["clone", &format!("{view}/one"), &format!("{root}/all")]);
        assert!(mount.root().join("all/dir").is_dir());
        let existing = [
            "clone",
            &format!("{view}/one/file"),
            &format!("{root}/file"),
        ];
        assert!(refused(&existing).contains("--replace"));
        done(&["clone", "--replace", existing[1], existing[2]]);
        let file = fs::read_to_string(mount.root().join("file")).expect("it is there");
        assert_eq!(file, "before");
        let missing = format!("{view}/one/none");
        assert!(
            refused(&["clone", &missing, &format!("{root}/x")]).contains("nothing of this name")
        );
        let elsewhere = bed.path().join("x");
        refused(&["clone", &format!("{view}/one/file"), text(&elsewhere)]);
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn a_view_of_a_removed_snapshot_is_stale() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = begin(&bed, transport);
        let root = text(mount.root()).to_owned();
        let long = vec![7; 8 << 20];
        fs::write(mount.root().join("long"), &long).expect("there is room");
        done(&["snapshot", "create", &root, "two"]);
        let top = snapshots(&mount).join("two");
        let dir = fs::File::open(&top).expect("it is there");
        let mut file = fs::File::open(top.join("long")).expect("it is there");
        let mut part = vec![0; 4096];
        file.read_exact(&mut part).expect("it is there");
        done(&["snapshot", "rm", &root, "two"]);
        fs::remove_file(mount.root().join("long")).expect("it is there");
        done(&["sync", "--checkpoint", &root]);
        // Bytes of then come, or an error; zeros never do.
        let mut read = part.len();
        let error = loop {
            match file.read(&mut part) {
                Ok(len) => {
                    assert!(len > 0, "a file of {} ends at {read}", long.len());
                    assert!(part[..len].iter().all(|byte| *byte == 7));
                    read += len;
                }
                Err(error) => break error.raw_os_error(),
            }
        };
        assert_eq!(error, Some(ESTALE));
        until("names are stale", || {
            let there = rustix::fs::statat(&dir, "file", rustix::fs::AtFlags::empty());
            matches!(there, Err(errno) if errno.raw_os_error() == ESTALE)
        });
        until("the name goes", || !top.exists());
        let one = snapshots(&mount).join("one/file");
        assert_eq!(fs::read_to_string(one).expect("it is there"), "before");
        drop((dir, file));
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn only_the_owner_enters_unless_all_may() {
    let bed = Bed::new("256M");
    bed.command_for_others();
    let enters = |mount: &Mount| {
        let file = snapshots(mount).join("one/file");
        let as_user = ["--reuid=1234", "--regid=1234", "--clear-groups", "cat"];
        let out = run("setpriv", &[&as_user[..], &[text(&file)]].concat());
        let place = fs::read_link(snapshots(mount)).expect("root may");
        let out2 = run("setpriv", &[&as_user[..3], &["ls", text(&place)]].concat());
        assert_eq!(out.status.success(), out2.status.success());
        out.status.success()
    };
    let mount = begin(&bed, "no_io_uring");
    assert!(!enters(&mount));
    mount.umount();
    let mount = bed.mount(&["-o", "no_io_uring,views=all"]);
    assert!(enters(&mount));
    mount.umount();
}

#[test]
fn nothing_is_mounted_before_a_program_looks_nor_stays_after_the_unmount() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = begin(&bed, transport);
        let threads = || {
            let tasks = format!("/proc/{}/task", mount.pid().as_raw_pid());
            let tasks = fs::read_dir(tasks).expect("it runs");
            let names = tasks.filter_map(|task| {
                fs::read_to_string(task.expect("it runs").path().join("comm")).ok()
            });
            names.filter(|name| name.starts_with("reader-")).count()
        };
        let before = threads();
        run_ok("find", &[text(mount.root())]);
        assert_eq!(threads(), before);
        assert!(mounts_of_views(&bed).is_empty());
        assert!(snapshots(&mount).join("one/file").exists());
        let views = mounts_of_views(&bed);
        assert_eq!(views.len(), 1);
        // A thread gives itself its name.
        until("two threads read", || threads() == before + 2);
        // Unmounted by somebody: it comes again.
        run_ok("umount", &[text(&views[0])]);
        assert!(snapshots(&mount).join("one/file").exists());
        assert_eq!(mounts_of_views(&bed), views);
        mount.umount();
        assert!(mounts_of_views(&bed).is_empty() && !views[0].exists());
    }
}

#[test]
fn a_view_in_use_does_not_keep_the_volume_mounted() {
    // By the command, by umount(8) without its helper, lazily, and by a signal.
    for way in 0..4 {
        let bed = Bed::new("256M");
        let mount = begin(&bed, TRANSPORTS[way % 2]);
        let top = snapshots(&mount).join("one");
        let mut file = fs::File::open(top.join("file")).expect("it is there");
        let place = top.canonicalize().expect("it is there");
        let mut program = Command::new("sleep")
            .arg("60")
            .current_dir(&top)
            .stdin(Stdio::null())
            .spawn()
            .expect("it is there");
        let (root, pid) = (text(mount.root()).to_owned(), mount.pid());
        let process = pidfd_open(pid, PidfdFlags::empty()).expect("it runs");
        match way {
            0 => drop(done(&["umount", &root])),
            1 => drop(run_ok("umount", &["-i", &root])),
            2 => drop(run_ok("umount", &["-i", "-l", &root])),
            _ => kill_process(pid, Signal::TERM).expect("it runs"),
        }
        let limit = Timespec {
            tv_sec: 20,
            tv_nsec: 0,
        };
        let ended = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit));
        assert_eq!(ended, Ok(1), "the daemon ends, way {way}");
        let mut bytes = Vec::new();
        let read = file.read_to_end(&mut bytes);
        assert!(
            read.is_ok_and(|len| len == 6) || bytes.is_empty(),
            "{bytes:?}"
        );
        let error = fs::metadata(&place).expect_err("the views are gone");
        assert!(
            matches!(error.raw_os_error(), Some(2 | ENOTCONN)),
            "{error}"
        );
        assert!(mounts_of_views(&bed).is_empty(), "way {way}");
        program.kill().expect("it is a child");
        program.wait().expect("it is a child");
        drop(mount);
        bed.fsck();
    }
}

#[test]
fn a_killed_daemon_leaves_no_path_that_hangs_and_no_view() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = begin(&bed, transport);
        let top = snapshots(&mount).join("one");
        let _file = fs::File::open(top.join("file")).expect("it is there");
        let place = mounts_of_views(&bed).pop().expect("it is mounted");
        kill_process(mount.pid(), Signal::KILL).expect("it runs");
        until("the views are unmounted", || {
            mounts_of_views(&bed).is_empty()
        });
        until("their directory goes", || !place.exists());
        for path in [top.join("file"), mount.root().join("file")] {
            let out = run("timeout", &["10", "cat", text(&path)]);
            assert_eq!(out.status.code(), Some(1), "{}", path.display());
        }
        force_unmount(mount.root());
        drop(mount);
        // The last of the daemon may hold the volume for a moment.
        let volume = bed.volume();
        let fsck = ["fsck", "--files", text(&volume)];
        until("the volume is free and clean", || {
            run(ramet_bin(), &fsck).status.success()
        });
    }
}

#[test]
fn a_private_mount_namespace_with_the_views_keeps_nothing_waiting() {
    let bed = Bed::new("256M");
    let mount = begin(&bed, "no_io_uring");
    let top = snapshots(&mount).join("one");
    assert!(top.join("file").exists());
    let root = text(mount.root()).to_owned();
    // Has copies of both mounts, and unmounts that of the volume only.
    let script = format!("umount -i {root}; echo ready; exec sleep 60");
    let mut other = Command::new("unshare")
        .args(["-m", "--propagation", "private", "sh", "-c", &script])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it is there");
    let status = format!("/proc/{}/comm", other.id());
    until("the other namespace is ready", || {
        fs::read_to_string(&status).is_ok_and(|comm| comm.trim() == "sleep")
    });
    let begin = Instant::now();
    done(&["umount", &root]);
    assert!(begin.elapsed() < PATIENCE, "{:?}", begin.elapsed());
    other.kill().expect("it is a child");
    other.wait().expect("it is a child");
    drop(mount);
    bed.fsck();
}

#[test]
fn a_thousand_views_stay_within_the_memory_limit() {
    const SNAPSHOTS: usize = 1000;
    let bed = Bed::new("1G");
    let mount = bed.mount(&["-o", "no_io_uring,memory=256M"]);
    let root = text(mount.root()).to_owned();
    for number in 0..SNAPSHOTS {
        fs::write(mount.root().join("n"), number.to_string()).expect("there is room");
        done(&["snapshot", "create", &root, &format!("s{number}")]);
    }
    let top = snapshots(&mount);
    let file = |number: usize| top.join(format!("s{number}/n"));
    // One after the other, and all at once.
    for number in 0..SNAPSHOTS {
        let told = fs::read_to_string(file(number)).expect("it is there");
        assert_eq!(told, number.to_string());
    }
    let open = |number| fs::File::open(file(number)).expect("there is room for it");
    let open: Vec<fs::File> = (0..SNAPSHOTS).map(open).collect();
    for (number, mut file) in open.iter().enumerate() {
        let mut told = String::new();
        file.read_to_string(&mut told).expect("it is open");
        assert_eq!(told, number.to_string());
    }
    let counted = mount.stat()["memory"]["requests_bytes"].as_u64();
    let most = mount.memory("VmHWM");
    assert!(most < 256 << 20, "{most}");
    println!("{SNAPSHOTS} views at once: {most} bytes at most, {counted:?} counted");
    drop(open);
    mount.umount();
}

#[test]
fn an_ordinary_user_looks_into_snapshots_of_their_own_mount() {
    const USER: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        println!("not root: every other test of this run is already one by an ordinary user");
        return;
    }
    let (bed, bin) = Bed::of_user(USER);
    let ramet = text(&bin);
    let script = format!(
        "{ramet} mkfs --size 1G volume.ramet; {ramet} mount volume.ramet mnt
         echo before > mnt/file; {ramet} snapshot create mnt one; echo later > mnt/file
         cat mnt/.ramet/snapshots/one/file
         {ramet} clone mnt/.ramet/snapshots/one/file mnt/copy; cat mnt/copy
         refused touch mnt/.ramet/snapshots/one/file
         ls -d ramet-views-*; cd mnt/.ramet/snapshots/one; {ramet} umount $OLDPWD/mnt; cd $TMPDIR
         refused ls -d ramet-views-*; {ramet} fsck volume.ramet >/dev/null; echo end"
    );
    let (lines, said) = bed.script_of(USER, &script);
    assert_eq!(lines, ["before", "before", "end"], "{said}");
}

#[test]
fn the_reserved_directory_is_listed_before_all_others() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = bed.mount(&["-o", transport]);
        // The kernel has opened no directory of this mount.
        let listed = run_ok("ls", &["-A", text(&mount.root().join(".ramet"))]);
        assert_eq!(listed, "snapshots\n");
        assert_eq!(run_ok("ls", &["-A", text(mount.root())]), "");
        mount.umount();
    }
}

#[test]
fn another_mount_with_the_number_of_unmounted_views_lives_on() {
    for ends in [false, true] {
        // Other tests take numbers too.
        let is_same = (0..100).any(|_| another_takes_the_number_of_views(ends));
        assert!(is_same, "no number was given again");
    }
}

/// Has a daemon that `ends`, or whose views are looked for again, find them unmounted, while other
/// mounts stand, which must live on. Answers whether one of them has the number that the views had.
fn another_takes_the_number_of_views(ends: bool) -> bool {
    let bed = Bed::new("256M");
    let mount = begin(&bed, "no_io_uring");
    assert!(snapshots(&mount).join("one/file").exists());
    let views = mounts_of_views(&bed);
    let number = fs::metadata(&views[0]).expect("it is mounted").dev();
    run_ok("umount", &[text(&views[0])]);
    // The kernel gives the lowest number that is free.
    let beds: Vec<Bed> = (0..4).map(|_| Bed::new("256M")).collect();
    let is_it = |mount: &Mount| fs::metadata(mount.root()).expect("it is mounted").dev() == number;
    let mut others: Vec<Mount> = Vec::new();
    for bed in &beds {
        if !others.iter().any(is_it) {
            others.push(bed.mount(&["-o", "no_io_uring"]));
        }
    }
    let is_same = others.iter().any(is_it);
    if !ends {
        assert!(snapshots(&mount).join("one/file").exists());
    }
    mount.umount();
    for mount in others {
        fs::write(mount.root().join("file"), "x").expect("it lives");
        mount.umount();
    }
    is_same
}

#[test]
fn one_thread_and_many_lookups_mount_the_views_once() {
    let bed = Bed::new("256M");
    let mount = begin(&bed, "no_io_uring,threads=1");
    let file = snapshots(&mount).join("one/file");
    std::thread::scope(|threads| {
        for _ in 0..32 {
            threads.spawn(|| {
                let out = run("timeout", &["60", "cat", text(&file)]);
                assert_eq!(out.stdout, b"before");
            });
        }
    });
    assert_eq!(mounts_of_views(&bed).len(), 1);
    mount.umount();
    bed.fsck();
}

#[test]
fn a_merge_gives_nobody_the_reserved_name() {
    let bed = Bed::new("256M");
    let mount = begin(&bed, "no_io_uring");
    let at = |name: &str| mount.root().join(name);
    done(&["fork", text(mount.root()), text(&at("fork"))]);
    fs::create_dir(at("fork/.ramet")).expect("it is no root");
    assert!(refused(&["merge", text(&at("fork"))]).contains("not merged"));
    let shown = fs::read_to_string(snapshots(&mount).join("one/file"));
    assert_eq!(shown.expect("it is shown"), "before");
    fs::remove_dir(at("fork/.ramet")).expect("it is empty");
    fs::write(at("fork/new"), "x").expect("there is room");
    done(&["merge", text(&at("fork"))]);
    assert!(at("new").exists());
    mount.umount();
    bed.fsck();
}
