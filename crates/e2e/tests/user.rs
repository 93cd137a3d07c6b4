//! An ordinary user mounts a volume of their own, clones, and gets no further than that.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;

use ramet_e2e::{Bed, ramet_bin, run_ok};

/// `nobody`, which every Debian has.
const USER: u32 = 65534;

#[test]
fn an_ordinary_user_mounts_and_clones() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: every other test of this run is already one by an ordinary user");
        return;
    }
    let (bed, bin) = Bed::of_user(USER);
    let as_user = |program: &str, args: &[&str]| {
        let out = Command::new(program)
            .args(args)
            .current_dir(bed.path())
            .uid(USER)
            .gid(USER)
            .output()
            .unwrap_or_else(|e| panic!("{program}: {e}"));
        let text = [out.stdout, out.stderr].concat();
        (
            out.status.success(),
            String::from_utf8_lossy(&text).into_owned(),
        )
    };
    let must = |program: &str, args: &[&str]| {
        let (ok, text) = as_user(program, args);
        assert!(ok, "{program} {args:?}: {text}");
        text
    };
    let ramet = bin.to_str().expect("temporary paths are UTF-8");
    must(ramet, &["mkfs", "--size", "1G", "volume.ramet"]);
    must(ramet, &["mount", "volume.ramet", "mnt"]);
    let undo = Undo {
        ramet,
        dir: bed.mount_point(),
    };
    must(
        "sh",
        &[
            "-c",
            "mkdir mnt/a && echo text > mnt/a/file && chmod 600 mnt/a/file",
        ],
    );
    must(ramet, &["clone", "mnt/a", "mnt/b"]);
    assert_eq!(must("cat", &["mnt/b/file"]), "text\n");
    let owner = must("stat", &["-c", "%u %g %a", "mnt/b/file"]);
    assert_eq!(owner.trim(), format!("{USER} {USER} 600"));
    must(ramet, &["sync", "mnt"]);
    must(ramet, &["stat", "mnt"]);
    must(ramet, &["rm", "mnt/a"]);
    must(ramet, &["umount", "mnt"]);
    std::mem::forget(undo);
    assert!(must("ls", &["mnt"]).is_empty());
    must(ramet, &["fsck", "volume.ramet"]);

    // Root may not look into it, but may end it.
    must(ramet, &["mount", "volume.ramet", "mnt"]);
    run_ok(
        ramet_bin(),
        &["umount".as_ref(), bed.mount_point().as_os_str()],
    );
    must(ramet, &["fsck", "volume.ramet"]);
}

#[test]
fn on_a_shared_mount_a_user_clones_only_files_of_their_own() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: nothing can be shared");
        return;
    }
    let bed = Bed::new("1G");
    let bin = bed.command_for_others();
    let mount = bed.mount(&[]);
    let root = mount.root();
    std::fs::set_permissions(root, PermissionsExt::from_mode(0o1777)).expect("ours");
    for (name, mode, owner) in [
        ("roots", 0o755, 0),
        ("users", 0o755, USER),
        ("closed", 0o700, 0),
    ] {
        let dir = root.join(name);
        std::fs::create_dir(&dir).expect("root may");
        std::fs::write(dir.join("file"), name).expect("root may");
        std::fs::set_permissions(&dir, PermissionsExt::from_mode(mode)).expect("root may");
        std::os::unix::fs::chown(&dir, Some(owner), Some(owner)).expect("root may");
    }
    let clone = |src: &str, dst: &str| {
        Command::new(&bin)
            .args([
                "clone".as_ref(),
                "--replace".as_ref(),
                root.join(src).as_os_str(),
                root.join(dst).as_os_str(),
            ])
            .uid(USER)
            .gid(USER)
            .output()
            .expect("the command runs")
            .status
            .success()
    };
    assert!(clone("users", "copy"));
    assert_eq!(root.join("copy").metadata().expect("cloned").uid(), USER);
    assert!(
        !clone("roots", "copy2"),
        "cloned a directory of another owner"
    );
    assert!(
        !clone("closed/file", "copy3"),
        "cloned out of a closed directory"
    );
    assert!(
        !clone("users", "roots/copy4"),
        "cloned into a directory of another owner"
    );
    // The mount point's sticky bit protects files of others from being replaced.
    assert!(
        !clone("users", "roots"),
        "replaced a directory of another owner"
    );
    assert_eq!(
        std::fs::read_to_string(root.join("roots/file")).expect("still there"),
        "roots"
    );
    mount.umount();
}

/// Ends the user's mount when the test fails.
struct Undo<'a> {
    ramet: &'a str,
    dir: std::path::PathBuf,
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        let _ = Command::new(self.ramet)
            .arg("umount")
            .arg(&self.dir)
            .status();
    }
}
