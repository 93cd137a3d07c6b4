//! Snapshots of the volume through the command, on mounts of both transports.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::Output;
use std::sync::Arc;

use ramet_betree::Batch;
use ramet_block::{Access, FileDevice};
use ramet_e2e::{Bed, done, ramet_bin, refused, run, run_ok, text, until};
use ramet_fs::{Clock, OpenOptions, Time, Volume};
use serde_json::Value;

const TRANSPORTS: [&str; 2] = ["io_uring", "no_io_uring"];

fn ramet(args: &[&str]) -> Output {
    run(ramet_bin(), args)
}

fn list(dir: &str) -> Vec<Value> {
    let told = done(&["snapshot", "list", "--json", dir]);
    serde_json::from_str(&told).expect("JSON")
}

fn names(dir: &str) -> Vec<String> {
    let told = list(dir).into_iter();
    told.map(|one| one["name"].as_str().expect("a name").to_owned())
        .collect()
}

#[test]
fn snapshots_are_made_told_mounted_and_removed() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = bed.mount(&["-o", transport]);
        let root = text(mount.root()).to_owned();
        let file = mount.root().join("dir/file");
        fs::create_dir(mount.root().join("dir")).expect("there is room");
        fs::write(&file, "before").expect("there is room");
        fs::hard_link(&file, mount.root().join("other")).expect("there is room");
        let number = fs::metadata(&file).expect("it is there").ino();
        let before = mount.stat();
        done(&["snapshot", "create", &root, "one"]);
        let after = mount.stat();
        assert_eq!(after["snapshots"], 1);
        assert_eq!(
            after["seq"].as_u64(),
            before["seq"].as_u64().map(|seq| seq + 1),
            "one record"
        );
        fs::write(&file, "later").expect("there is room");
        fs::remove_file(mount.root().join("other")).expect("it is there");
        done(&["snapshot", "create", &root, "two"]);
        assert_eq!(names(&root), ["one", "two"]);
        assert!(list(&root)[0]["exclusive_bytes"].is_u64());
        assert!(refused(&["snapshot", "create", &root, "one"]).contains("already"));
        assert!(refused(&["snapshot", "rm", &root, "none"]).contains("no snapshot"));
        assert!(refused(&["snapshot", "create", &root, "a/b"]).contains("no slash"));
        assert!(refused(&["snapshot", "create", "/", "one"]).contains("not on a Ramet mount"));
        mount.umount();
        let volume = bed.volume();
        let writes = ["mount", "-o", "snapshot=one", text(&volume), &root];
        assert!(refused(&writes).contains("'ro'"));
        let missing = ["mount", "-o", "ro,snapshot=no", text(&volume), &root];
        assert!(refused(&missing).contains("no snapshot"));
        let shown = bed.mount(&["-o", transport, "-o", "ro,snapshot=one"]);
        assert_eq!(fs::read_to_string(&file).expect("it is there"), "before");
        let other = fs::metadata(shown.root().join("other")).expect("it is there");
        assert_eq!((other.nlink(), other.ino()), (2, number));
        for error in [
            fs::write(&file, "x").expect_err("a snapshot"),
            fs::remove_file(&file).expect_err("a snapshot"),
            fs::create_dir(shown.root().join("new")).expect_err("a snapshot"),
        ] {
            assert_eq!(error.raw_os_error(), Some(30), "{error}");
        }
        let made = refused(&["snapshot", "create", &root, "three"]);
        assert!(made.contains("read-only"), "{made}");
        shown.umount();
        let mount = bed.mount(&["-o", transport]);
        assert_eq!(fs::read_to_string(&file).expect("it is there"), "later");
        done(&["snapshot", "rm", &root, "one"]);
        assert_eq!(names(&root), ["two"]);
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn bytes_of_mappings_are_in_a_snapshot() {
    const STORES: &str = r#"
import mmap, os, subprocess, sys
root, ramet = sys.argv[1:3]
fd = os.open(root + "/mapped", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 1 << 20)
pages = mmap.mmap(fd, 1 << 20)
for number in range(20):
    pages[number * 4096:number * 4096 + 4] = b"%04d" % number
    subprocess.run([ramet, "snapshot", "create", root, "s%d" % number], check=True)
"#;
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let root = text(mount.root()).to_owned();
    run_ok("python3", &["-c", STORES, &root, text(ramet_bin())]);
    mount.umount();
    for number in [0, 7, 19] {
        let option = format!("ro,snapshot=s{number}");
        let shown = bed.mount(&["-o", &option]);
        let bytes = fs::read(shown.root().join("mapped")).expect("it is there");
        for page in 0..20 {
            let told = &bytes[page * 4096..page * 4096 + 4];
            let stored = format!("{page:04}").into_bytes();
            let want = if page <= number { stored } else { vec![0; 4] };
            assert_eq!(told, want, "page {page} of {number}");
        }
        shown.umount();
    }
}

#[test]
fn users_may_list_snapshots_and_nothing_else() {
    let bed = Bed::new("256M");
    let bin = bed.command_for_others();
    let mount = bed.mount(&[]);
    let root = text(mount.root()).to_owned();
    done(&["snapshot", "create", &root, "one"]);
    let as_user = |args: &[&str]| {
        let all = [
            &["--reuid=1234", "--regid=1234", "--clear-groups", text(&bin)],
            args,
        ];
        run("setpriv", &all.concat())
    };
    assert!(as_user(&["snapshot", "list", &root]).status.success());
    assert!(as_user(&["snapshot", "policy", &root]).status.success());
    for args in [
        &["snapshot", "create", &root, "two"][..],
        &["snapshot", "rm", &root, "one"],
        &["snapshot", "policy", &root, "hourly=1"],
        &["log", &root],
        &["diff", "--at", "one", &root],
        &["restore", "--at", "one", &root, &format!("{root}/x")],
    ] {
        let out = as_user(args);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(
            !out.status.success() && said.contains("only root"),
            "{said}"
        );
    }
    assert_eq!(names(&root), ["one"]);
    mount.umount();
}

#[test]
fn a_policy_stands_in_the_volume_and_the_daemon_follows_it() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let root = text(mount.root()).to_owned();
    assert_eq!(done(&["snapshot", "policy", &root]).trim(), "none");
    assert!(refused(&["snapshot", "policy", &root, "yearly=1"]).contains("no part of a policy"));
    let told = done(&["snapshot", "policy", &root, "daily=2,hourly=3"]);
    assert_eq!(told.trim(), "hourly=3,daily=2");
    mount.umount();
    let mount = bed.mount(&[]);
    // The daemon looks when it begins.
    let made = || list(&root).len() == 2;
    for _ in 0..300 {
        if made() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let makers: Vec<_> = list(&root)
        .into_iter()
        .map(|s| s["made_by"].clone())
        .collect();
    assert_eq!(makers, ["hourly", "daily"]);
    mount.umount();
    bed.fsck();
}

/// A clock at the end of 2035.
#[derive(Debug)]
struct Ahead;

impl Clock for Ahead {
    fn now(&self) -> Time {
        Time {
            secs: 2_080_000_000,
            nanos: 0,
        }
    }
}

#[test]
fn snapshot_of_a_clock_that_was_ahead_is_told_and_stops_no_policy() {
    let bed = Bed::new("256M");
    let device = FileDevice::open(bed.volume(), Access::ReadWrite).expect("it is there");
    let options = OpenOptions {
        clock: Some(Arc::new(Ahead)),
        ..OpenOptions::default()
    };
    let volume = Volume::open(Arc::new(device), options).expect("it is whole");
    let snapshots = volume.snapshots();
    let policy = "daily=2".parse().expect("a policy");
    snapshots.set_policy(policy).expect("there is room");
    let mut made = Vec::new();
    snapshots.follow_policy(&mut made).expect("there is room");
    volume.close().expect("it is whole");
    drop(volume);
    assert_eq!(made.len(), 1);

    let mount = bed.mount(&[]);
    let root = text(mount.root()).to_owned();
    until("the policy is followed", || list(&root).len() == 2);
    let out = ramet(&["snapshot", "policy", &root]);
    assert_eq!(String::from_utf8_lossy(&out.stdout).trim(), "daily=2");
    let noted = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(
        noted.contains(&made[0]) && noted.contains("ahead"),
        "{noted}"
    );
    let told = done(&["snapshot", "policy", "--json", &root]);
    let told: Value = serde_json::from_str(&told).expect("JSON");
    assert_eq!(told["ahead_of_clock"][0], made[0]);
    done(&["snapshot", "rm", &root, &made[0]]);
    let out = ramet(&["snapshot", "policy", &root]);
    assert!(out.stderr.is_empty(), "{out:?}");
    mount.umount();
    let log = fs::read_to_string(bed.path().join("daemon.log")).expect("it is there");
    let warned = log
        .lines()
        .filter(|line| line.contains("WARN") && line.contains(&made[0]));
    assert_eq!(warned.count(), 1, "{log}");
    bed.fsck();
}

#[test]
fn snapshot_with_a_damaged_record_is_told_and_can_be_removed() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let root = text(mount.root()).to_owned();
    let file = mount.root().join("file");
    fs::write(&file, "text").expect("there is room");
    for name in ["one", "two", "three"] {
        done(&["snapshot", "create", &root, name]);
    }
    mount.umount();
    let device = FileDevice::open(bed.volume(), Access::ReadWrite).expect("it is there");
    let volume = Volume::open(Arc::new(device), OpenOptions::default()).expect("it is whole");
    let mut batch = Batch::new();
    batch.put(&b"\x01\x02\x00two"[..], "damaged");
    volume.tree().apply(batch).expect("there is room");
    volume.close().expect("it is whole");
    drop(volume);
    let found = ramet(&["fsck", "--files", text(&bed.volume())]);
    let told = String::from_utf8_lossy(&found.stdout).into_owned();
    assert_eq!(found.status.code(), Some(4), "{told}");
    assert!(told.contains("F16") && told.contains("two"), "{told}");

    let mount = bed.mount(&[]);
    for args in [
        &["snapshot", "list", &root][..],
        &["snapshot", "list", "--json", &root],
        &["log", text(&file)],
    ] {
        let out = ramet(args);
        assert_eq!(out.status.code(), Some(1), "{out:?}");
        let (told, said) = (
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr),
        );
        assert!(told.contains("one"), "{told}");
        assert!(said.contains("snapshot 'two'"), "{said}");
        assert!(said.contains("left out because of damage: 1"), "{said}");
    }
    let views = mount.root().join(".ramet/snapshots");
    let shown = fs::read_dir(&views).expect("it is there");
    let shown: Vec<_> = shown.map(|one| one.expect("a name").file_name()).collect();
    assert_eq!(shown, ["one", "three"]);
    assert!(fs::metadata(views.join("two")).is_err());
    let text_of = |name: &str| fs::read_to_string(views.join(name).join("file"));
    assert_eq!(text_of("three").expect("it is there"), "text");
    assert!(refused(&["snapshot", "create", &root, "two"]).contains("already"));
    done(&["snapshot", "rm", &root, "two"]);
    assert_eq!(names(&root), ["one", "three"]);
    mount.umount();
    bed.fsck();
}

#[test]
fn files_and_trees_come_back_from_a_snapshot() {
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = bed.mount(&["-o", transport]);
        let root = text(mount.root()).to_owned();
        let at = |path: &str| format!("{root}/{path}");
        fs::create_dir_all(at("dir/inner")).expect("there is room");
        fs::write(at("dir/inner/file"), "before").expect("there is room");
        done(&["snapshot", "create", &root, "one"]);
        fs::write(at("dir/inner/file"), "later").expect("there is room");
        let read = |path: &str| fs::read_to_string(at(path)).expect("it is there");
        let open = fs::File::open(at("dir/inner/file")).expect("it is there");
        let out = ramet(&["diff", "--at", "one", &at("dir")]);
        let told = String::from_utf8_lossy(&out.stdout).into_owned();
        assert_eq!(out.status.code(), Some(1), "{out:?}");
        assert!(
            told.contains("content") && told.contains("inner/file"),
            "{told}"
        );
        let file = at("dir/inner/file");
        assert!(refused(&["restore", "--at", "one", &file]).contains("--replace"));
        assert!(refused(&["restore", "--at", "no", &file, &at("x")]).contains("no snapshot"));
        done(&["restore", "--at", "one", &file, &at("copy")]);
        assert_eq!(
            (read("copy"), read("dir/inner/file")),
            ("before".into(), "later".into())
        );
        done(&["restore", "--replace", "--at", "one", &at("dir")]);
        assert_eq!(read("dir/inner/file"), "before");
        // A file that is open goes on.
        let mut text_of_open = String::new();
        std::io::Read::read_to_string(&mut &open, &mut text_of_open).expect("it is open");
        assert_eq!(text_of_open, "later");
        fs::remove_dir_all(at("dir")).expect("it is there");
        done(&[
            "restore",
            "--at",
            "one",
            &at("dir/inner/file"),
            &at("again"),
        ]);
        assert_eq!(read("again"), "before");
        done(&["restore", "--at", "one", &at("dir")]);
        done(&["snapshot", "create", &root, "two"]);
        fs::remove_dir_all(at("dir")).expect("it is there");
        let log = done(&["log", "--json", &at("dir/inner")]);
        let log: Vec<Value> = serde_json::from_str(&log).expect("JSON");
        let words: Vec<_> = log.iter().map(|one| one["change"][0].as_str()).collect();
        assert_eq!(words.first(), Some(&Some("added")));
        assert_eq!(words.last(), Some(&Some("removed")));
        assert_eq!(done(&["log", &root]).lines().count(), log.len() + 1);
        drop(open);
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn a_slash_behind_the_path_restores_no_copy_within_it() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let root = text(mount.root()).to_owned();
    let at = |path: &str| format!("{root}/{path}");
    fs::create_dir_all(at("package/package")).expect("there is room");
    fs::write(at("package/top"), "before").expect("there is room");
    fs::write(at("package/package/inner"), "before").expect("there is room");
    done(&["snapshot", "create", &root, "one"]);
    fs::write(at("package/top"), "later").expect("there is room");
    fs::remove_file(at("package/package/inner")).expect("it is there");
    assert!(refused(&["restore", "--at", "one", &at("package/")]).contains("--replace"));
    done(&["restore", "--replace", "--at", "one", &at("package//")]);
    let read = |path: &str| fs::read_to_string(at(path)).expect("it is there");
    assert_eq!(read("package/top"), "before");
    assert_eq!(read("package/package/inner"), "before");
    assert!(!fs::exists(at("package/package/top")).expect("it is told"));
    fs::remove_dir_all(at("package")).expect("it is there");
    done(&["restore", "--at", "one", &at("package/")]);
    assert_eq!(read("package/package/inner"), "before");
    // The root of a mount is no name that an object comes back to.
    assert!(refused(&["restore", "--at", "one", "/"]).contains("not a name"));
    mount.umount();
    bed.fsck();
}

#[test]
fn a_path_by_way_of_the_directory_above_is_that_of_its_last_name() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let root = text(mount.root()).to_owned();
    let at = |path: &str| format!("{root}/{path}");
    fs::create_dir_all(at("project/sub")).expect("there is room");
    fs::create_dir_all(at("target")).expect("there is room");
    fs::write(at("project/gone"), "before").expect("there is room");
    fs::write(at("target/file"), "before").expect("there is room");
    std::os::unix::fs::symlink("../target", at("project/link")).expect("there is room");
    done(&["snapshot", "create", &root, "one"]);
    fs::remove_file(at("project/gone")).expect("it is there");
    fs::write(at("target/file"), "later").expect("it is there");
    let above = |name: &str| at(&format!("project/sub/../{name}"));
    // A name that is not there any more.
    assert!(done(&["log", &above("gone")]).contains("removed"));
    done(&["restore", "--at", "one", &above("gone")]);
    let read = |path: &str| fs::read_to_string(at(path)).expect("it is there");
    assert_eq!(read("project/gone"), "before");
    // A link is not followed: it is the object that comes back, and not the tree behind it.
    done(&["restore", "--replace", "--at", "one", &above("link")]);
    let link = fs::symlink_metadata(at("project/link")).expect("it is there");
    assert!(link.is_symlink());
    assert_eq!(read("target/file"), "later");
    // A tree that is not there any more is sent out of the snapshot.
    fs::remove_dir_all(at("target")).expect("it is there");
    let tree = at("project/sub/../../target");
    assert!(
        !run(ramet_bin(), &["send", "--at", "one", &tree])
            .stdout
            .is_empty()
    );
    // A path that ends in '..' is that of a directory.
    let log = done(&["log", &at("project/sub/..")]);
    assert_eq!(log, done(&["log", &at("project")]));
    mount.umount();
    bed.fsck();
}

#[test]
fn a_volume_is_rolled_back_when_it_is_not_mounted() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let root = text(mount.root()).to_owned();
    let file = mount.root().join("file");
    fs::write(&file, "before").expect("there is room");
    done(&["snapshot", "create", &root, "one"]);
    fs::write(&file, "later").expect("there is room");
    let volume = bed.volume();
    let volume = text(&volume);
    mount.umount();
    assert!(refused(&["snapshot", "rollback", volume, "no"]).contains("there is no snapshot"));
    let told = done(&["snapshot", "rollback", volume, "one"]);
    bed.fsck();
    let mount = bed.mount(&[]);
    assert_eq!(fs::read_to_string(&file).expect("it is there"), "before");
    let kept = names(&root);
    assert_eq!((&kept[0][..], kept.len()), ("one", 2));
    assert!(told.trim().ends_with(&kept[1]), "{told}");
    mount.umount();
    done(&["snapshot", "rollback", volume, &kept[1]]);
    let mount = bed.mount(&[]);
    assert_eq!(fs::read_to_string(&file).expect("it is there"), "later");
    mount.umount();
    bed.fsck();
}
