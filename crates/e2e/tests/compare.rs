//! `ramet diff` and `ramet du` on a mount.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;

use ramet_e2e::{Bed, ramet_bin, run};
use serde_json::Value;

/// Exit status and standard output of the command.
fn ramet(args: &[&OsStr]) -> (i32, String) {
    let out = run(ramet_bin(), args);
    assert_eq!(out.status.signal(), None, "{args:?}");
    let text = String::from_utf8(out.stdout).expect("the command prints ASCII");
    (out.status.code().unwrap_or(-1), text)
}

fn json(args: &[&OsStr]) -> Value {
    serde_json::from_str(&ramet(args).1).expect("the command prints JSON")
}

fn diff(a: &Path, b: &Path) -> (i32, String) {
    ramet(&["diff".as_ref(), a.as_os_str(), b.as_os_str()])
}

#[test]
fn diff_tells_the_changes_in_a_clone() {
    let bed = Bed::new("1G");
    let mount = bed.mount(&[]);
    let (a, b) = (mount.root().join("a"), mount.root().join("b"));
    let write = |path: &Path, text: &str| fs::write(path, text).expect("the mount is writable");
    fs::create_dir_all(a.join("deep/er")).expect("the mount is writable");
    for n in 0..300 {
        write(&a.join(format!("deep/er/{n}")), "as it was");
    }
    fs::create_dir(a.join("gone")).expect("the mount is writable");
    write(&a.join("gone/inside"), "x");
    write(&a.join("turned"), "a file");
    mount.clone_path(&a, &b);
    assert_eq!(diff(&a, &b), (0, String::new()));

    write(&b.join("deep/er/7"), "as it is");
    write(&b.join(OsStr::from_bytes(b"new\n\xff\x1b")), "");
    fs::create_dir(b.join("whole")).expect("the mount is writable");
    write(&b.join("whole/part"), "x");
    fs::remove_dir_all(b.join("gone")).expect("the mount is writable");
    fs::remove_file(b.join("turned")).expect("the mount is writable");
    fs::create_dir(b.join("turned")).expect("the mount is writable");
    let (status, text) = diff(&a, &b);
    let expected = "content, metadata  deep/er/7\n\
                    removed            gone/\n\
                    added              new\\x0a\\xff\\x1b\n\
                    type               turned/\n\
                    added              whole/\n";
    assert_eq!((status, text.as_str()), (1, expected));
    let found = json(&["diff".as_ref(), "--json".as_ref(), a.as_ref(), b.as_ref()]);
    assert_eq!(found[2]["path_hex"], "6e65770aff1b");
    assert_eq!(found.as_array().map(Vec::len), Some(5));

    // More than one page, and the other way round.
    for n in 0..3000 {
        write(&b.join(format!("{n}-{}", "long".repeat(20))), "");
    }
    let (status, text) = diff(&b, &a);
    assert_eq!((status, text.lines().count()), (1, 3005));

    assert_eq!(diff(&a, bed.path()).0, 2);
    assert_eq!(diff(&a, &a.join("turned")).0, 2);
    mount.umount();
    bed.fsck();
}

#[test]
fn du_tells_shared_from_exclusive() {
    let bed = Bed::new("1G");
    let mount = bed.mount(&[]);
    let (a, b) = (mount.root().join("a"), mount.root().join("b"));
    fs::create_dir(&a).expect("the mount is writable");
    let mut state = 1u64;
    let mut noise = |len: usize| -> Vec<u8> {
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as u8
        };
        (0..len).map(|_| next()).collect()
    };
    for n in 0..24 {
        fs::write(a.join(n.to_string()), noise(1 << 20)).expect("the mount is writable");
    }
    mount.clone_path(&a, &b);
    for n in 0..8 {
        fs::write(b.join(n.to_string()), noise(1 << 20)).expect("the mount is writable");
    }
    let du = |dir: &Path| json(&["du".as_ref(), "--json".as_ref(), dir.as_ref()]);
    let mib = |usage: &Value, field: &str| usage[field].as_u64().expect("a number") >> 20;
    // Work in the background goes on for a while, and space comes back with the checkpoint after
    // the next.
    let settled = || [(); 5].map(|()| mount.allocated_settled() >> 20)[4];
    let before = settled();
    let usage = du(&b);
    assert!((20..=30).contains(&mib(&usage, "logical_bytes")), "{usage}");
    assert!(mib(&usage, "shared_bytes") >= 8, "{usage}");
    let exclusive = mib(&usage, "exclusive_bytes");
    assert!(exclusive >= 7, "{usage}");
    mount.remove(&b);
    let freed = before.saturating_sub(settled());
    // The second figure may be larger: it has nodes that both referred to and that the first one
    // was about to release.
    assert!(
        freed + 1 + exclusive / 10 >= exclusive,
        "{freed} MiB came back: {usage}"
    );
    assert_eq!(mib(&du(&a), "shared_bytes"), 0);
    mount.umount();
    bed.fsck();
}
