//! One volume, two writers: the second is refused on every way to the volume, and its message names
//! the user of the volume.
//!
//! The tests make loop devices, a mapped device, bind mounts, an overlay and namespaces, so they
//! run as root.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ramet_e2e::{Bed, is_mount_point, kill_and_wait, ramet_bin, run, run_ok};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// A loop device, detached at the end.
struct Loop(PathBuf);

impl Loop {
    fn over(file: &Path, options: &[&str]) -> Loop {
        let mut args = vec![OsStr::new("--show"), "--find".as_ref()];
        args.extend(options.iter().map(OsStr::new));
        args.push(file.as_ref());
        Loop(run_ok("losetup", &args).trim().into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run("losetup", &[OsStr::new("--detach"), self.0.as_ref()]);
    }
}

/// Mounting `volume`, and making a new one over it, is refused with `words`.
fn refused(volume: &Path, bed: &Bed, words: &str) {
    let dir = bed.path().join("second");
    fs::create_dir_all(&dir).expect("ours");
    let (volume, dir): (&OsStr, &OsStr) = (volume.as_ref(), dir.as_ref());
    let commands: [&[&OsStr]; 2] = [
        &["mount".as_ref(), volume, dir],
        &["mkfs".as_ref(), "--force".as_ref(), volume],
    ];
    for command in commands {
        let out = run(ramet_bin(), command);
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success(), "{command:?} succeeded");
        assert!(text.contains("in use"), "{command:?} said: {text}");
        assert!(text.contains(words), "{command:?} said: {text}");
    }
}

#[test]
fn a_mounted_image_is_refused_by_every_name_and_through_every_loop_device() {
    let bed = Bed::new("64M");
    let loops = Loop::over(&bed.volume(), &[]);
    let stacked = Loop::over(&loops.0, &[]);
    let mount = bed.mount(&[]);
    let holder = format!("by process {}", mount.pid().as_raw_pid());

    refused(&bed.volume(), &bed, &holder);
    let link = bed.path().join("link");
    fs::hard_link(bed.volume(), &link).expect("ours");
    refused(&link, &bed, &holder);
    let bound = bed.path().join("bound");
    fs::write(&bound, "").expect("ours");
    run_ok(
        "mount",
        &[OsStr::new("--bind"), bed.volume().as_ref(), bound.as_ref()],
    );
    let tried = std::panic::catch_unwind(|| refused(&bound, &bed, &holder));
    run_ok("umount", &[&bound]);
    tried.expect("refused by way of a bind mount");
    refused(&loops.0, &bed, &holder);
    refused(&stacked.0, &bed, &holder);
    // Made while it is mounted, of a part, and by the other name.
    let later = Loop::over(&link, &["--offset", "1M", "--sizelimit", "8M"]);
    refused(&later.0, &bed, &holder);

    let second = bed.path().join("second");
    let script = r#"mount -t tmpfs none /mnt && cp "$1" /dev/null && "$0" mount "$1" "$2""#;
    for volume in [bed.volume(), loops.0.clone()] {
        let out = run(
            "unshare",
            &[
                OsStr::new("--mount"),
                "sh".as_ref(),
                "-c".as_ref(),
                script.as_ref(),
                ramet_bin().as_ref(),
                volume.as_ref(),
                second.as_ref(),
            ],
        );
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && text.contains(&holder), "{text}");
    }
    mount.umount();

    // The other way round: the device over the image is in use.
    let (image, dir) = (bed.volume(), bed.mount_point());
    run_ok(
        ramet_bin(),
        &[OsStr::new("mount"), stacked.0.as_ref(), dir.as_ref()],
    );
    let tried = std::panic::catch_unwind(|| {
        for volume in [&image, &loops.0, &stacked.0, &later.0] {
            refused(volume, &bed, "by process");
        }
    });
    run_ok(ramet_bin(), &[OsStr::new("umount"), dir.as_ref()]);
    tried.expect("refused while a loop device over it is mounted");
    drop((stacked, loops));
    bed.mount(&[]).umount();
    bed.fsck();
}

#[test]
fn a_loop_device_that_is_not_in_use_is_in_nobodys_way() {
    let bed = Bed::new("64M");
    let _loops = Loop::over(&bed.volume(), &[]);
    let mount = bed.mount(&[]);
    fs::write(mount.root().join("file"), "kept").expect("it is mounted");
    mount.umount();
    bed.fsck();
}

#[test]
fn parts_of_one_image_that_do_not_overlap_are_two_volumes() {
    let bed = Bed::without_volume();
    let image = bed.path().join("disk");
    let file = fs::File::create(&image).expect("ours");
    file.set_len(64 << 20).expect("sparse");
    let first = Loop::over(&image, &["--sizelimit", "32M"]);
    let second = Loop::over(&image, &["--offset", "32M"]);
    let across = Loop::over(&image, &["--offset", "16M", "--sizelimit", "32M"]);
    let dirs = ["a", "b"].map(|name| bed.path().join(name));
    for (part, dir) in [&first, &second].into_iter().zip(&dirs) {
        fs::create_dir(dir).expect("ours");
        run_ok(ramet_bin(), &[OsStr::new("mkfs"), part.0.as_ref()]);
        run_ok(
            ramet_bin(),
            &[OsStr::new("mount"), part.0.as_ref(), dir.as_ref()],
        );
    }
    let tried = std::panic::catch_unwind(|| {
        refused(&across.0, &bed, "through /dev/loop");
        refused(&image, &bed, "through /dev/loop");
    });
    for dir in &dirs {
        run_ok(ramet_bin(), &[OsStr::new("umount"), dir.as_ref()]);
    }
    tried.expect("what overlaps is refused");
}

#[test]
fn a_volume_on_a_mapped_device_is_told_from_the_image_below() {
    let bed = Bed::new("64M");
    let loops = Loop::over(&bed.volume(), &[]);
    let name = format!("ramet-e2e-{}", std::process::id());
    let table = format!("0 {} linear {} 0", (64 << 20) / 512, loops.0.display());
    let made = run("dmsetup", &["create", &name, "--table", &table]);
    if !made.status.success() {
        println!("skipped: no device mapper here");
        return;
    }
    let mapped = Path::new("/dev/mapper").join(&name);
    let tried = std::panic::catch_unwind(|| {
        let mount = bed.mount(&[]);
        refused(&mapped, &bed, "by process");
        mount.umount();
        let dir = bed.mount_point();
        run_ok(
            ramet_bin(),
            &[OsStr::new("mount"), mapped.as_ref(), dir.as_ref()],
        );
        refused(&bed.volume(), &bed, "by process");
        refused(&loops.0, &bed, "");
        run_ok(ramet_bin(), &[OsStr::new("umount"), dir.as_ref()]);
    });
    run("dmsetup", &["remove", "--retry", &name]);
    tried.expect("refused by way of a mapped device");
}

/// The folder of a bed as an overlay shows it: the same bytes behind other inodes, so that no lock
/// on one meets the other.
struct Overlay(PathBuf);

impl Overlay {
    fn of(bed: &Bed) -> Overlay {
        let [lower, upper, work, merged] =
            ["lower", "upper", "work", "merged"].map(|name| bed.path().join(name));
        for dir in [&lower, &upper, &work, &merged] {
            fs::create_dir(dir).expect("ours");
        }
        let (lower, upper, work) = (lower.display(), upper.display(), work.display());
        let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
        let args = ["-t", "overlay", "none", "-o", &options];
        let mut args: Vec<&OsStr> = args.iter().map(OsStr::new).collect();
        args.push(merged.as_ref());
        run_ok("mount", &args);
        Overlay(bed.path().to_path_buf())
    }

    /// The volume by one of its two names.
    fn volume(&self, folder: &str) -> PathBuf {
        self.0.join(folder).join("volume")
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        run("umount", &[self.0.join("merged")]);
    }
}

fn ramet(words: &[&OsStr]) -> Output {
    run(ramet_bin(), words)
}

fn said(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into_owned()
}

/// Process that serves the mount at `dir`.
fn daemon_of(dir: &Path) -> Pid {
    let stat = run_ok(
        ramet_bin(),
        &["stat".as_ref(), "--json".as_ref(), dir.as_os_str()],
    );
    let stat: Value = serde_json::from_str(&stat).expect("JSON");
    let pid = stat["pid"].as_i64().expect("a mount is served");
    Pid::from_raw(pid.try_into().expect("a pid")).expect("not zero")
}

/// Ends a daemon and removes its mount, in any state that a test left them in.
struct Served(PathBuf, Pid);

impl Served {
    fn at(dir: &Path) -> Served {
        Served(dir.to_path_buf(), daemon_of(dir))
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if is_mount_point(&self.0) {
            kill_and_wait(self.1);
            ramet(&["umount".as_ref(), self.0.as_ref()]);
        }
    }
}

#[test]
fn without_any_lock_the_owner_block_keeps_a_second_writer_out_and_stops_one_that_comes_back() {
    let bed = Bed::without_volume();
    let overlay = Overlay::of(&bed);
    let (one, other) = (overlay.volume("upper"), overlay.volume("merged"));
    let dirs = ["first", "second"].map(|name| bed.path().join(name));
    for dir in &dirs {
        fs::create_dir(dir).expect("ours");
    }
    run_ok(
        ramet_bin(),
        &[
            "mkfs".as_ref(),
            "--size".as_ref(),
            "64M".as_ref(),
            one.as_os_str(),
        ],
    );
    run_ok(
        ramet_bin(),
        &["mount".as_ref(), one.as_os_str(), dirs[0].as_os_str()],
    );
    let first = Served::at(&dirs[0]);
    let write = |dir: &Path, name: &str| -> std::io::Result<()> {
        let mut file = fs::File::create(dir.join(name))?;
        file.write_all(name.repeat(1000).as_bytes())?;
        file.sync_all()
    };
    write(&dirs[0], "before").expect("it is mounted");

    // While the first one writes.
    let mount_second = || ramet(&["mount".as_ref(), other.as_os_str(), dirs[1].as_os_str()]);
    let is_over = AtomicBool::new(false);
    let out = thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0.. {
                write(&dirs[0], &format!("during{number}")).expect("it is its own");
                if is_over.load(Ordering::SeqCst) {
                    break;
                }
            }
        });
        let out = mount_second();
        is_over.store(true, Ordering::SeqCst);
        out
    });
    let text = said(&out);
    let holder = format!("process {}", first.1.as_raw_pid());
    assert!(!out.status.success(), "a second writer was let in");
    assert!(
        text.contains("in use by") && text.contains(&holder),
        "{text}"
    );

    // While it is stopped: the second one waits, says so, and takes the volume.
    let names: Vec<_> = fs::read_dir(&dirs[0]).expect("it is mounted").collect();
    kill_process(first.1, Signal::STOP).expect("ours");
    let begun = Instant::now();
    let out = mount_second();
    let text = said(&out);
    assert!(out.status.success(), "{text}");
    assert!(begun.elapsed() >= Duration::from_secs(10));
    assert!(text.contains("waiting") && text.contains(&holder), "{text}");
    let second = Served::at(&dirs[1]);
    let found = fs::read_dir(&dirs[1]).expect("it is mounted").count();
    assert_eq!(found, names.len(), "everything acknowledged is there");
    write(&dirs[1], "after").expect("it is its own");

    // The first one goes on, and neither writes nor acknowledges.
    let before = fs::read(&one).expect("ours");
    kill_process(first.1, Signal::CONT).expect("ours");
    let lost = write(&dirs[0], "lost").expect_err("it was acknowledged");
    assert!(matches!(lost.raw_os_error(), Some(5 | 30)), "{lost}");
    assert!(
        before == fs::read(&one).expect("ours"),
        "the first one wrote"
    );
    let stat = run_ok(
        ramet_bin(),
        &["stat".as_ref(), "--json".as_ref(), dirs[0].as_os_str()],
    );
    let stat: Value = serde_json::from_str(&stat).expect("JSON");
    let why = stat["poisoned"].as_str().expect("it stopped");
    let taker = format!("process {}", second.1.as_raw_pid());
    assert!(why.contains(&taker), "{why}");
    let out = ramet(&["umount".as_ref(), dirs[0].as_os_str()]);
    assert!(
        !out.status.success(),
        "what was written is lost, and umount says so"
    );
    if is_mount_point(&dirs[0]) {
        kill_and_wait(first.1);
        run_ok(ramet_bin(), &["umount".as_ref(), dirs[0].as_os_str()]);
    }

    write(&dirs[1], "at last").expect("it is its own");
    run_ok(ramet_bin(), &["umount".as_ref(), dirs[1].as_os_str()]);
    let fsck = ["fsck".as_ref(), "--files".as_ref(), one.as_os_str()];
    run_ok(ramet_bin(), &fsck);
    let begun = Instant::now();
    run_ok(
        ramet_bin(),
        &["mount".as_ref(), one.as_os_str(), dirs[0].as_os_str()],
    );
    assert!(begun.elapsed() < Duration::from_secs(5), "it was closed");
    let third = Served::at(&dirs[0]);
    for name in names.iter().flatten().map(|entry| entry.file_name()) {
        let name = name.to_string_lossy();
        let bytes = fs::read(dirs[0].join(&*name)).expect("it was acknowledged");
        assert!(bytes == name.repeat(1000).as_bytes(), "{name}");
    }
    for name in ["after", "at last"] {
        let bytes = fs::read(dirs[0].join(name)).expect("it was acknowledged");
        assert!(bytes == name.repeat(1000).as_bytes(), "{name}");
    }
    assert!(!dirs[0].join("lost").exists());
    drop(third);
}

#[test]
fn an_owner_that_was_killed_is_not_waited_for_and_one_of_another_namespace_is() {
    let bed = Bed::new("64M");
    let mount = bed.mount(&[]);
    fs::write(mount.root().join("file"), "kept").expect("it is mounted");
    run_ok(ramet_bin(), &[OsStr::new("sync"), mount.root().as_ref()]);
    mount.kill_daemon();
    mount.detach_dead();
    let fsck = run_ok(ramet_bin(), &[OsStr::new("fsck"), bed.volume().as_ref()]);
    assert!(fsck.contains("not closed by process"), "{fsck}");
    let begun = Instant::now();
    let mount = bed.mount(&[]);
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "its owner is dead"
    );
    mount.kill_daemon();
    mount.detach_dead();

    // Seen from a PID namespace where its number says nothing.
    let (volume, dir) = (bed.volume(), bed.mount_point());
    let script = r#""$0" mount "$1" "$2" 2>&1 && cat "$2/file" && "$0" umount "$2""#;
    let begun = Instant::now();
    let words = [
        "--pid",
        "--mount",
        "--fork",
        "--mount-proc",
        "sh",
        "-c",
        script,
    ];
    let mut words: Vec<&OsStr> = words.iter().map(OsStr::new).collect();
    words.extend([ramet_bin().as_os_str(), volume.as_ref(), dir.as_ref()]);
    let text = run_ok("unshare", &words);
    assert!(text.contains("waiting") && text.ends_with("kept"), "{text}");
    assert!(begun.elapsed() >= Duration::from_secs(10));
    bed.fsck();
    // Read-only opens neither wait nor say anything.
    let area = || {
        let mut area = vec![0; 131_072];
        let file = fs::File::open(&volume).expect("ours");
        file.read_exact_at(&mut area, 0).expect("it is longer");
        area
    };
    let mount = bed.mount(&[]);
    mount.kill_daemon();
    mount.detach_dead();
    let before = area();
    bed.mount(&["-o", "ro"]).umount();
    bed.fsck();
    assert!(before == area());
}

#[test]
fn a_volume_shows_its_label_and_its_uuid() {
    let bed = Bed::without_volume();
    let uuid = "6ba7b810-9dad-41d1-80b4-00c04fd430c8";
    let volume = bed.volume();
    let mkfs = |words: &[&str]| {
        let mut words: Vec<&OsStr> = words.iter().map(OsStr::new).collect();
        words.insert(0, "mkfs".as_ref());
        words.push(volume.as_ref());
        ramet(&words)
    };
    assert!(
        mkfs(&["--size", "16M", "-L", "Bücher", "-U", uuid])
            .status
            .success()
    );
    let shown = |target: &Path| {
        let stat = run_ok(
            ramet_bin(),
            &["stat".as_ref(), "--json".as_ref(), target.as_os_str()],
        );
        let stat: Value = serde_json::from_str(&stat).expect("JSON");
        (stat["label"].clone(), stat["uuid"].clone())
    };
    let given = (Value::from("Bücher"), Value::from(uuid));
    assert_eq!(shown(&volume), given);
    let mount = bed.mount(&[]);
    assert_eq!(shown(mount.root()), given);
    let text = run_ok(ramet_bin(), &[OsStr::new("stat"), mount.root().as_ref()]);
    assert!(text.contains("Bücher") && text.contains(uuid), "{text}");
    mount.umount();
    assert_eq!(shown(&volume), given);
    // Where other programs look for them (docs/format.md).
    let mut bytes = vec![0; 4096];
    let file = fs::File::open(&volume).expect("ours");
    file.read_exact_at(&mut bytes, 0).expect("it is longer");
    assert_eq!(&bytes[..8], b"RAMETvol");
    assert_eq!(bytes[16..20], [0x6b, 0xa7, 0xb8, 0x10]);
    assert_eq!(&bytes[200..208], "Bücher\0".as_bytes());

    assert!(mkfs(&["--force"]).status.success());
    let (label, random) = shown(&volume);
    assert_eq!(label, "");
    assert_ne!(random, uuid);
    let long = "x".repeat(65);
    for (words, why) in [
        (["--force", "-L", &long], "64 bytes"),
        (["--force", "-U", "6ba7b810"], "not a UUID"),
    ] {
        let out = mkfs(&words);
        assert!(!out.status.success() && said(&out).contains(why));
    }
    assert_eq!(shown(&volume).1, random);
}
