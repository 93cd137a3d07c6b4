//! Sources and destinations of `ramet clone` and `ramet rm`, as the user names them.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ramet_e2e::{Bed, ramet_bin, run, run_ok};
use rustix::fs::{CWD, RenameFlags, renameat_with};

/// `nobody`, which every Debian has.
const USER: u32 = 65534;

fn clone(args: &[&Path]) -> Result<(), String> {
    let out = run(ramet_bin(), &[&[Path::new("clone")], args].concat());
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    if out.status.success() {
        Ok(())
    } else {
        Err(said)
    }
}

fn slashed(path: &Path) -> PathBuf {
    path.join("")
}

#[test]
fn a_destination_that_exists_is_kept_unless_the_user_says_replace() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let at = |name: &str| mount.root().join(name);
    let read = |name: &str| fs::read_to_string(at(name)).expect("it is there");
    fs::create_dir_all(at("src")).expect("writable");
    fs::create_dir_all(at("backups/monday")).expect("writable");
    for (name, text) in [
        ("src/a", "v"),
        ("note", "note"),
        ("backups/monday/data", "data"),
    ] {
        fs::write(at(name), text).expect("writable");
    }
    symlink("backups", at("current")).expect("writable");

    for src in ["src", "note", "current"] {
        for dst in ["backups", "current", "note", "src"] {
            let refused = clone(&[&at(src), &at(dst)]).expect_err("it exists");
            assert!(refused.contains("--replace"), "{src} {dst}: {refused}");
        }
    }
    // A slash means into, through a link too.
    clone(&[&at("note"), &slashed(&at("backups"))]).unwrap();
    clone(&[&slashed(&at("src")), &slashed(&at("current"))]).unwrap();
    assert_eq!(
        (read("backups/note"), read("backups/src/a")),
        ("note".into(), "v".into())
    );
    assert!(at("current").is_symlink());
    let refused = clone(&[&at("note"), &slashed(&at("backups"))]).expect_err("it exists");
    assert!(
        refused.contains("backups/note: already exists"),
        "{refused}"
    );
    fs::write(at("note"), "newer").expect("writable");
    clone(&[
        Path::new("--replace"),
        &at("note"),
        &slashed(&at("backups")),
    ])
    .unwrap();
    assert_eq!(read("backups/note"), "newer");
    assert_eq!(read("backups/monday/data"), "data");
    // The current directory is into as well.
    run_ok(
        "sh",
        &[
            Path::new("-c"),
            Path::new("cd \"$1\" && \"$2\" clone ../note ."),
            Path::new("sh"),
            &at("src"),
            ramet_bin(),
        ],
    );
    assert_eq!(read("src/note"), "newer");

    // The tree as a whole, in one step; the link itself.
    clone(&[Path::new("--replace"), &at("src"), &at("backups")]).unwrap();
    assert!(read("backups/a") == "v" && !at("backups/monday").exists());
    clone(&[Path::new("--replace"), &at("note"), &at("current")]).unwrap();
    assert!(!at("current").is_symlink());
    mount.umount();
    bed.fsck();
}

#[test]
fn a_clone_onto_a_link_of_its_source_is_a_file_of_its_own() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let (a, b) = (mount.root().join("a"), mount.root().join("b"));
    fs::write(&a, "one").expect("writable");
    fs::hard_link(&a, &b).expect("writable");
    clone(&[&a, &b]).expect_err("it exists");
    mount.replace_path(&a, &b);
    fs::write(&b, "two").expect("writable");
    assert_eq!(fs::read_to_string(&a).expect("it is there"), "one");
    assert_eq!(fs::metadata(&a).expect("it is there").nlink(), 1);
    mount.umount();
    bed.fsck();
}

#[test]
fn root_is_not_led_by_links_of_other_users() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: nobody else's links lead anywhere");
        return;
    }
    const CLONES: usize = 150;
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let at = |name: &str| mount.root().join(name);
    fs::create_dir_all(at("vault/inner/deep")).expect("writable");
    fs::write(at("vault/inner/secret"), "x").expect("writable");
    fs::set_permissions(at("vault"), PermissionsExt::from_mode(0o700)).expect("ours");
    fs::create_dir_all(at("user/dir/deep")).expect("writable");
    symlink(at("vault/inner"), at("user/link")).expect("writable");
    for name in ["user", "user/dir", "user/dir/deep", "user/link"] {
        lchown(at(name), Some(USER), Some(USER)).expect("root may");
    }
    for (src, dst) in [
        ("user/link/", "copy"),
        ("user/link/deep", "copy"),
        ("vault/inner", "user/link/copy"),
        ("vault/inner", "user/link/"),
    ] {
        let refused = clone(&[&at(src), &at(dst)]).expect_err("a link of the user");
        assert!(refused.contains("control of another user"), "{refused}");
    }
    let path = at("user/link/deep");
    let refused = run(ramet_bin(), &[Path::new("rm"), &path]);
    assert!(!refused.status.success() && at("vault/inner/deep").exists());
    // The link itself is a source.
    clone(&[&at("user/link"), &at("copied link")]).unwrap();
    assert!(at("copied link").is_symlink());
    // A link of root's own leads there.
    symlink("vault", at("ours")).expect("writable");
    clone(&[&at("ours/inner"), &at("ours/copy")]).unwrap();

    let (dir, link, copy) = (at("user/dir"), at("user/link"), at("user/copy"));
    let is_done = AtomicBool::new(false);
    thread::scope(|threads| {
        threads.spawn(|| {
            while !is_done.load(Ordering::SeqCst) {
                renameat_with(CWD, &dir, CWD, &link, RenameFlags::EXCHANGE).expect("both exist");
            }
        });
        let mut found = Vec::new();
        for _ in 0..CLONES {
            // Refused, or a clone of the file that the name leads to at that moment.
            let _ = clone(&[&dir, &copy]);
            if !copy.is_symlink() && copy.join("secret").exists() {
                found.push("the directory");
            }
            let _ = run(ramet_bin(), &[Path::new("rm"), Path::new("-f"), &copy]);
            let _ = clone(&[&dir.join("deep"), &copy]);
            if copy.exists() && copy.metadata().is_ok_and(|seen| seen.uid() == 0) {
                found.push("what is below it");
            }
            let _ = run(ramet_bin(), &[Path::new("rm"), Path::new("-f"), &copy]);
        }
        is_done.store(true, Ordering::SeqCst);
        assert!(found.is_empty(), "led by a link: {found:?}");
    });
    mount.umount();
    bed.fsck();
}

#[test]
fn a_removed_file_keeps_no_space() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let empty = mount.allocated_settled();
    for number in 0..8 {
        let file = mount.root().join(format!("file{number}"));
        let mut noise = fs::File::open("/dev/urandom").expect("noise").take(4 << 20);
        let mut written = fs::File::create(&file).expect("writable");
        io::copy(&mut noise, &mut written).expect("written");
        mount.remove(&file);
    }
    let inodes = || mount.stat()["inodes_in_memory"].as_u64();
    let begun = Instant::now();
    // The kernel forgets the last file a moment later.
    while inodes() != Some(1) {
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", inodes());
        thread::sleep(Duration::from_millis(20));
    }
    let left = mount.allocated_settled() - empty;
    assert!(left < 4 << 20, "{left} bytes");
    mount.umount();
    bed.fsck();
}

#[test]
fn rm_goes_on_behind_a_path_that_cannot_be_removed() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let at = |name: &str| mount.root().join(name);
    let rm = |options: &[&str], names: &[&str]| {
        let options = options.iter().map(PathBuf::from);
        let paths = names.iter().map(|name| at(name));
        let args: Vec<PathBuf> = std::iter::once("rm".into())
            .chain(options)
            .chain(paths)
            .collect();
        let out = run(ramet_bin(), &args);
        let said = String::from_utf8_lossy(&out.stderr).lines().count();
        (out.status.code(), said)
    };
    let make = || {
        fs::create_dir_all(at("tree/inner")).expect("writable");
        fs::write(at("file"), "x").expect("writable");
    };
    make();
    assert_eq!(rm(&[], &["none", "tree", "neither", "file"]), (Some(1), 2));
    assert!(!at("tree").exists() && !at("file").exists());
    make();
    assert_eq!(
        rm(&["-rf"], &["none", "tree", "file", "file/none"]),
        (Some(0), 0)
    );
    assert!(!at("tree").exists() && !at("file").exists());
    assert_eq!(rm(&["-f"], &[]), (Some(0), 0));
    assert_eq!(rm(&["-r"], &[]).0, Some(2));
    make();
    symlink("tree", at("link")).expect("writable");
    assert_eq!(rm(&["-f"], &["link/"]), (Some(1), 1));
    assert_eq!(rm(&["-R"], &["tree/", "link"]), (Some(0), 0));
    assert!(!at("tree").exists() && !at("link").is_symlink());
    mount.umount();
    bed.fsck();
}

/// A path that leads to one template or another at each moment is cloned and forked, as cp copies it.
#[test]
fn a_source_that_is_replaced_meanwhile_is_cloned() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let at = |name: &str| mount.root().join(name);
    for name in ["new", "template"] {
        fs::create_dir(at(name)).expect("writable");
        fs::write(at(name).join("file"), "text").expect("writable");
    }
    let has_ended = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                mount.replace_path(&at("new"), &at("template"));
            }
        });
        for number in 0..40 {
            let (clone, fork) = (at(&format!("c{number}")), at(&format!("f{number}")));
            for (verb, made) in [("clone", &clone), ("fork", &fork)] {
                let out = run(ramet_bin(), &[Path::new(verb), &at("template"), made]);
                let said = String::from_utf8_lossy(&out.stderr);
                if !out.status.success() {
                    has_ended.store(true, Ordering::Relaxed);
                    panic!("{verb}: {said}");
                }
            }
        }
        has_ended.store(true, Ordering::Relaxed);
    });
    mount.umount();
    bed.fsck();
}
