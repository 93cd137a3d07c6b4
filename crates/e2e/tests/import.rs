//! Imports and exports through real mounts, beside `cp -a`, rsync and GNU tar.

use std::fs;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ramet_e2e::kinds::{assert_same, make_every_kind};
use ramet_e2e::{Bed, ramet_bin, run, run_ok, text};

/// Both transports, as options of `ramet mount`.
const TRANSPORTS: [&str; 2] = ["no_io_uring", "io_uring"];
const USER: u32 = 65534;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn import(args: &[&str], stdin: Stdio) -> Output {
    let mut command = Command::new(ramet_bin());
    command.arg("import").args(args).stdin(stdin);
    command.output().expect("the command runs")
}

#[test]
fn directory_comes_in_with_everything() {
    for transport in TRANSPORTS {
        let bed = Bed::new("2G");
        let source = bed.path().join("source");
        make_every_kind(&source);
        let mount = bed.mount(&["-o", transport]);
        let (root, src) = (mount.root(), text(&source));
        let told = run_ok(
            ramet_bin(),
            &["import", "--verify", src, text(&root.join("new"))],
        );
        assert!(told.contains("verified"), "{told}");
        assert_same(&source, &root.join("new"));
        let sectors = root.join("new/sparse").metadata().unwrap().blocks();
        assert_eq!(sectors, 8, "holes stay");
        let links = |name: &str| root.join("new").join(name).metadata().unwrap();
        assert_eq!(links("hard").nlink(), 3);
        assert_eq!(links("hard").ino(), links("d/e/hard").ino());

        let again = import(&[src, text(&root.join("new"))], Stdio::null());
        let why = String::from_utf8_lossy(&again.stderr).into_owned();
        assert!(
            !again.status.success() && why.contains("already exists"),
            "{why}"
        );
        let into = format!("{}/", text(&root.join("new")));
        run_ok(ramet_bin(), &["import", src, &into]);
        assert_same(&source, &root.join("new/source"));
        mount.umount();
        bed.fsck();

        // Straight to the volume, and through a mount again.
        let inside = format!("{}:/new/d/direct", text(&bed.volume()));
        run_ok(ramet_bin(), &["import", src, &inside]);
        let mount = bed.mount(&["-o", transport]);
        assert_same(&source, &mount.root().join("new/d/direct"));
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn archives_come_in_and_go_out_as_gnu_tar_has_them() {
    let bed = Bed::new("2G");
    let source = bed.path().join("source");
    make_every_kind(&source);
    let mount = bed.mount(&[]);
    let (root, src) = (mount.root(), text(&source));
    let path = |name: &str| bed.path().join(name);
    for (name, options) in [
        (
            "pax",
            &["--format=pax", "--xattrs", "--xattrs-include=*"][..],
        ),
        ("gnu", &["--format=gnu", "--sparse"]),
        (
            "pax-0.0",
            &["--format=pax", "--sparse", "--sparse-version=0.0"],
        ),
        (
            "pax-0.1",
            &["--format=pax", "--sparse", "--sparse-version=0.1"],
        ),
        (
            "pax-1.0",
            &["--format=pax", "--sparse", "--sparse-version=1.0"],
        ),
    ] {
        let archive = path(name);
        let mut args = options.to_vec();
        args.extend(["-cf", text(&archive), "-C", src, "."]);
        run_ok("tar", &args);
        let (file, stream) = (root.join(name), root.join(format!("{name}-stream")));
        run_ok(
            ramet_bin(),
            &["import", "--verify", text(&archive), text(&file)],
        );
        let piped = import(
            &["-", text(&stream)],
            fs::File::open(&archive).unwrap().into(),
        );
        assert!(piped.status.success(), "{piped:?}");
        assert_same(&file, &stream);
        if name == "pax" {
            assert_same(&source, &file);
        } else {
            assert_eq!(file.join("sparse").metadata().unwrap().blocks(), 8);
            run_ok(
                "diff",
                &[
                    "-r",
                    "--no-dereference",
                    "-x",
                    "pipe",
                    "-x",
                    "null",
                    src,
                    text(&file),
                ],
            );
        }
    }

    // Compressed. An archive that is cut leaves nothing.
    let (packed, cut, new) = (path("packed"), path("cut"), root.join("packed"));
    let options = ["--format=pax", "--xattrs", "--xattrs-include=*"];
    let with_gzip = ["-czf", text(&packed), "-C", src, "."];
    run_ok("tar", &[&options[..], &with_gzip].concat());
    let whole = fs::read(&packed).unwrap();
    fs::write(&cut, &whole[..whole.len() / 2]).unwrap();
    let failed = import(&[text(&cut), text(&new)], Stdio::null());
    let why = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(why.contains("cannot be read on") && !new.exists(), "{why}");
    let told = import(&["--json", text(&packed), text(&new)], Stdio::null()).stdout;
    let told: serde_json::Value = serde_json::from_slice(&told).unwrap();
    assert_eq!(
        (told["links"].as_u64(), told["told"].as_u64()),
        (Some(2), Some(0)),
        "{told}"
    );
    assert_same(&source, &new);

    // Out by the command, back by GNU tar, and by the command itself.
    let exported = path("exported.tar");
    let out = Command::new(ramet_bin())
        .args(["export", text(&root.join("pax"))])
        .stdout(fs::File::create(&exported).unwrap())
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    let back = path("back");
    fs::create_dir(&back).unwrap();
    let args = [
        "--xattrs",
        "--xattrs-include=*",
        "-xpf",
        text(&exported),
        "-C",
        text(&back),
    ];
    run_ok("tar", &args);
    assert_same(&source, &back);
    run_ok(
        ramet_bin(),
        &["import", text(&exported), text(&root.join("back"))],
    );
    assert_same(&source, &root.join("back"));
    mount.umount();
    bed.fsck();
}

#[test]
fn command_that_is_killed_leaves_nothing() {
    for transport in TRANSPORTS {
        let bed = Bed::new("2G");
        let mount = bed.mount(&["-o", transport]);
        let free = || mount.stat()["tree"]["pending_message_bytes"].clone();
        let before = mount.allocated_settled();
        // An archive that does not end: the command is in the middle of it.
        let mut command = Command::new(ramet_bin())
            .args(["import", "-", text(&mount.root().join("new"))])
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let source = bed.path().join("source");
        fs::create_dir(&source).unwrap();
        fs::write(source.join("file"), vec![b'x'; 64 << 20]).unwrap();
        let args = ["-cf", "-", "-C", text(&source), "file"];
        let tar = Command::new("tar").args(args).output().unwrap();
        let mut pipe = command.stdin.take().unwrap();
        let cut = tar.stdout.len() / 2;
        std::io::Write::write_all(&mut pipe, &tar.stdout[..cut]).unwrap();
        assert!(mount.root().read_dir().unwrap().next().is_none());
        command.kill().unwrap();
        command.wait().unwrap();
        assert!(mount.root().read_dir().unwrap().next().is_none());
        let begun = Instant::now();
        while mount.allocated_settled() > before + (1 << 20) {
            assert!(begun.elapsed() < Duration::from_secs(20), "{}", free());
        }
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn import_that_finds_no_space_leaves_nothing() {
    let bed = Bed::new("128M");
    let mount = bed.mount(&[]);
    let before = mount.allocated_settled();
    let source = bed.path().join("source");
    fs::create_dir(&source).unwrap();
    let mut noise = vec![0; 4 << 20];
    let mut random = fs::File::open("/dev/urandom").unwrap();
    for number in 0..40 {
        random.read_exact(&mut noise).unwrap();
        fs::write(source.join(format!("{number}")), &noise).unwrap();
    }
    let (src, new) = (text(&source), mount.root().join("new"));
    let out = import(&[src, text(&new)], Stdio::null());
    let why = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success() && why.contains("space"), "{why}");
    assert!(!new.exists());
    let begun = Instant::now();
    while mount.allocated_settled() > before + (4 << 20) {
        assert!(begun.elapsed() < Duration::from_secs(30), "space is kept");
    }
    fs::remove_dir_all(&source).unwrap();
    fs::create_dir(&source).unwrap();
    fs::write(source.join("small"), "x").unwrap();
    assert!(import(&[src, text(&new)], Stdio::null()).status.success());
    assert_same(&source, &new);
    mount.umount();
    bed.fsck();
}

#[test]
fn file_that_changes_while_it_is_read_is_told() {
    let bed = Bed::new("2G");
    let mount = bed.mount(&[]);
    let source = bed.path().join("source");
    fs::create_dir(&source).unwrap();
    let changing = fs::File::create(source.join("changing")).unwrap();
    changing.write_all_at(&vec![1; 16 << 20], 0).unwrap();
    let is_over = AtomicBool::new(false);
    let deadline = Instant::now() + Duration::from_secs(60);
    let told = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) && Instant::now() < deadline {
                changing.write_all_at(b"x", 5).unwrap();
            }
        });
        // The writer may get no processor during one import.
        let told = (0..20).find_map(|number| {
            let new = mount.root().join(number.to_string());
            let out = import(&[text(&source), text(&new)], Stdio::null());
            let len = new.join("changing").metadata().unwrap().len();
            assert_eq!(len, 16 << 20, "the rest is imported");
            (!out.status.success()).then_some(out)
        });
        is_over.store(true, Ordering::Relaxed);
        told
    });
    let told = told.expect("a change is told");
    let why = String::from_utf8_lossy(&told.stderr);
    assert_eq!(told.status.code(), Some(1), "{why}");
    assert!(
        why.contains("source/changing: changed while it was read"),
        "{why}"
    );
    mount.umount();
    bed.fsck();
}

#[test]
fn objects_that_cannot_be_read_are_told() {
    let bed = Bed::without_volume();
    let source = bed.path().join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("good"), "x").unwrap();
    fs::write(source.join("closed"), "x").unwrap();
    fs::set_permissions(source.join("closed"), PermissionsExt::from_mode(0o0)).unwrap();
    fs::set_permissions(source.join("good"), PermissionsExt::from_mode(0o4755)).unwrap();
    if !is_root() {
        println!("not root: the other tests of this file are those of an ordinary user");
        return;
    }
    bed.hand_to(USER, USER);
    let bin = bed.command_for_others();
    let as_user = |args: &[&str]| {
        let mut command = Command::new(&bin);
        command
            .args(args)
            .current_dir(bed.path())
            .uid(USER)
            .gid(USER);
        let out = command.output().unwrap();
        (
            out.status.code(),
            String::from_utf8_lossy(&out.stderr).into_owned(),
        )
    };
    let done = |args: &[&str]| assert_eq!(as_user(args), (Some(0), String::new()));
    done(&["mkfs", "-q", "--size", "1G", "volume.ramet"]);
    done(&["mount", "volume.ramet", "mnt"]);
    let (status, why) = as_user(&["import", "source", "mnt/new"]);
    assert_eq!(status, Some(1), "{why}");
    assert!(why.contains("source/closed: permission denied"), "{why}");
    let look = Command::new("stat")
        .args(["-c", "%u %a", "mnt/new/good"])
        .current_dir(bed.path())
        .uid(USER)
        .gid(USER)
        .output()
        .unwrap();
    assert_eq!(look.stdout, format!("{USER} 755\n").into_bytes());
    done(&["umount", "mnt"]);
    let out = run(ramet_bin(), &["import", "/nonexistent", "mnt/x"]);
    assert!(!out.status.success());
}

/// Writes an archive with members that no object can be, between two good ones.
const ODD: &str = r#"
import sys, tarfile
with tarfile.open(sys.argv[1], "w", format=tarfile.PAX_FORMAT) as archive:
    def add(name, kind=tarfile.REGTYPE, link="", records={}):
        member = tarfile.TarInfo(name)
        member.type, member.linkname, member.pax_headers = kind, link, records
        archive.addfile(member)
    add("first")
    add("n" * 256)
    add("d" * 256, tarfile.DIRTYPE)
    add("d" * 256 + "/below")
    add("nowhere", tarfile.SYMTYPE, "")
    add("long target", tarfile.SYMTYPE, "t" * 4096)
    add("zero", records={"path": "ze\0ro"})
    add("attribute", records={"SCHILY.xattr.user.big": "x" * (2 << 20), "SCHILY.xattr.user.a": "1"})
    add("last")
"#;

#[test]
fn members_that_no_object_can_be_are_told_and_the_rest_comes() {
    let bed = Bed::new("64M");
    let mount = bed.mount(&[]);
    let (archive, new) = (bed.path().join("odd.tar"), mount.root().join("new"));
    run_ok("python3", &["-c", ODD, text(&archive)]);
    let out = import(&[text(&archive), text(&new)], Stdio::null());
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert_eq!(said.lines().count(), 7, "{said}");
    let mut names: Vec<_> = fs::read_dir(&new)
        .expect("the rest came")
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["attribute", "first", "last"]);
    let attributes = run_ok("getfattr", &["-d", text(&new.join("attribute"))]);
    assert!(attributes.contains("user.a=\"1\"") && !attributes.contains("user.big"));
    mount.umount();
    bed.fsck();
}
