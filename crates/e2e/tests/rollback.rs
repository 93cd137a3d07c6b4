//! Rollbacks of mounted volumes, through both transports. `rollback.py` makes the calls.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use ramet_e2e::{Bed, done, ramet_bin, refused, run_ok, text};

const TRANSPORTS: [&str; 2] = ["io_uring", "no_io_uring"];

#[test]
fn programs_go_on_beside_rollbacks_of_their_volume() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: no file is opened by its handle");
        return;
    }
    for transport in TRANSPORTS {
        let bed = Bed::new("1G");
        let mount = bed.mount(&["-o", transport]);
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/rollback.py");
        let seed = std::env::var("RAMET_SEED").unwrap_or_else(|_| "1".to_owned());
        // Compiled modules would lie beside the scripts.
        let args = [
            "-B",
            text(&script),
            text(mount.root()),
            text(ramet_bin()),
            &seed,
        ];
        println!("{transport}: {}", run_ok("python3", &args).trim());
        mount.umount();
        bed.fsck();
    }
}

#[test]
fn a_rollback_is_refused_where_it_would_take_more_away_than_names() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let root = text(mount.root()).to_owned();
    fs::write(mount.root().join("file"), "then").expect("there is room");
    fs::create_dir(mount.root().join("dir")).expect("there is room");
    done(&["snapshot", "create", &root, "one"]);
    fs::write(mount.root().join("file"), "now").expect("there is room");
    let roll_back = |at: &str, name: &str| refused(&["snapshot", "rollback", at, name]);
    assert!(roll_back(&root, "none").contains("there is no snapshot of this name"));
    assert!(roll_back(&root, "a/b").contains("no slash"));
    assert!(roll_back("/", "one").contains("not on a Ramet mount"));
    if rustix::process::geteuid().is_root() {
        let inside = format!("{root}/dir");
        run_ok("mount", &["-t", "tmpfs", "tmpfs", &inside]);
        assert!(roll_back(&root, "one").contains(&format!("is mounted on {inside}")));
        run_ok("umount", &[&inside]);
        run_ok("mount", &["-o", "remount,ro,bind", &root]);
        assert!(roll_back(&root, "one").to_lowercase().contains("read-only"));
        run_ok("mount", &["-o", "remount,rw,bind", &root]);
    }
    let file = mount.root().join("file");
    assert_eq!(fs::read_to_string(&file).expect("it is there"), "now");
    // The image of a mounted volume leads to its mount.
    let open = fs::File::open(&file).expect("it is there");
    let number = fs::metadata(&file).expect("it is there").ino();
    let told = done(&["snapshot", "rollback", text(&bed.volume()), "one"]);
    assert!(told.contains("the state before is in snapshot before-rollback-"));
    let seen = fs::metadata(&file).expect("it is there");
    assert_ne!(seen.ino(), number);
    drop(open);
    assert_eq!(fs::read_to_string(&file).expect("it is there"), "then");
    mount.umount();
    bed.fsck();
    let mount = bed.mount(&[]);
    let again = fs::metadata(&file).expect("it is there");
    assert_eq!(again.ino(), seen.ino(), "numbers stay");
    mount.umount();
}
