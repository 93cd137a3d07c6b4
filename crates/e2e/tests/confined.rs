//! A process that sees a part of a mount reaches no other part by control calls.
//!
//! The process is root without `CAP_SYS_ADMIN` in a chroot of a bind mount, as in a container whose
//! volume is a directory of the mount. `confined.py` makes the calls.

use std::fs;
use std::path::Path;

use ramet_e2e::{Bed, done, refused, run_ok, text};
use serde_json::{Map, Value};

/// Options of the two ways on which requests come.
const TRANSPORTS: [&str; 2] = ["no_io_uring", "io_uring"];

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("not root: nothing can be bound");
    }
    is_root
}

fn outcomes<'a>(told: &'a Value, group: &str) -> &'a Map<String, Value> {
    told[group].as_object().expect("outcomes by call")
}

#[test]
fn process_in_a_part_of_the_mount_reaches_no_other_part() {
    if !is_root() {
        return;
    }
    for transport in TRANSPORTS {
        let bed = Bed::new("256M");
        let mount = bed.mount(&["-o", transport]);
        let (root, bound) = (mount.root().to_owned(), bed.path().join("bound"));
        let (part, out) = (root.join("part"), root.join("out"));
        fs::create_dir_all(part.join("mine")).expect("root may");
        fs::create_dir(&out).expect("root may");
        fs::create_dir(&bound).expect("the folder is new");
        fs::write(out.join("secret"), "of another tenant").expect("there is room");
        done(&["snapshot", "create", text(&root), "then"]);
        done(&["fork", text(&out), text(&root.join("work"))]);
        done(&["fork", text(&part.join("mine")), text(&part.join("own"))]);
        run_ok("mount", &[Path::new("--bind"), &part, &bound]);

        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/confined.py");
        let args = [
            "--bounding-set=-sys_admin",
            "python3",
            text(&script),
            text(&root),
            text(&bound),
            "work",
        ];
        let told = run_ok("setpriv", &args);
        println!("{transport}: {told}");
        let told: Value = serde_json::from_str(&told).expect("JSON");
        for (call, outcome) in outcomes(&told, "refused") {
            let errors = ["EPERM", "EINVAL", "ESTALE"];
            let is_refused = outcome
                .as_str()
                .is_some_and(|error| errors.contains(&error));
            assert!(is_refused, "{call}: {outcome}");
        }
        for (call, outcome) in outcomes(&told, "allowed") {
            assert_eq!(outcome, "done", "{call}");
        }
        let mut names: Vec<_> = fs::read_dir(&part)
            .expect("it is there")
            .map(|entry| entry.expect("it can be read").file_name())
            .collect();
        names.sort();
        assert_eq!(names, ["base", "mine", "own"]);
        let snapshots = done(&["snapshot", "list", text(&root)]);
        assert!(snapshots.contains("then") && !snapshots.contains("mine"));

        run_ok("umount", &[&bound]);
        mount.umount();
        bed.fsck();
    }
}

/// The command finds the root of the volume by itself, and says so where it sees none.
#[test]
fn command_in_a_bind_mount_finds_the_root_of_the_volume() {
    if !is_root() {
        return;
    }
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let (root, bound) = (mount.root().to_owned(), bed.path().join("bound"));
    let part = root.join("part");
    fs::create_dir(&part).expect("root may");
    fs::create_dir(&bound).expect("the folder is new");
    fs::write(part.join("file"), "then").expect("there is room");
    run_ok("mount", &[Path::new("--bind"), &part, &bound]);
    done(&["snapshot", "create", text(&bound), "one"]);
    fs::write(part.join("file"), "now").expect("there is room");
    let (file, copy) = (bound.join("file"), bound.join("copy"));
    assert!(done(&["log", text(&file)]).contains("content"));
    done(&["restore", "--at", "one", text(&file), text(&copy)]);
    assert_eq!(fs::read(&copy).expect("it is there"), b"then");
    done(&["scrub", "--fast", text(&bound)]);
    done(&["grow", "--size", "512M", text(&bound)]);

    // A mount namespace that has the bind mount alone.
    let hidden = |command: &[&str]| {
        let script = "umount \"$1\" && shift && exec \"$@\"";
        let ramet = text(ramet_e2e::ramet_bin());
        let args = ["--mount", "sh", "-c", script, "sh", text(&root), ramet];
        let out = ramet_e2e::run("unshare", &[&args[..], command].concat());
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success(), "{command:?}");
        said
    };
    for command in [
        &["snapshot", "create", text(&bound), "two"][..],
        &["log", text(&file)],
        &[
            "restore",
            "--at",
            "one",
            text(&file),
            text(&bound.join("again")),
        ],
        &["scrub", text(&bound)],
        &["grow", "--size", "1G", text(&bound)],
    ] {
        let said = hidden(command);
        assert!(said.contains("a part of its volume"), "{command:?}: {said}");
    }
    assert!(refused(&["snapshot", "create", "/", "two"]).contains("not on a Ramet mount"));
    run_ok("umount", &[&bound]);
    mount.umount();
    bed.fsck();
}
