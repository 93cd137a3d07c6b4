//! One volume, two writers: the second is refused, by whatever way it comes, and told by what the volume is in use.
//!
//! The tests make loop devices, a mapped device, bind mounts and mount namespaces, so they run as root.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use ramet_e2e::{Bed, ramet_bin, run, run_ok};

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

    // The other way round: what lies over the image is in use.
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
