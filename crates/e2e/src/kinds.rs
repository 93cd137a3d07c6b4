//! A tree with every kind of object, and rsync's word on whether two trees are the same.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, Uid, XattrFlags, mknodat, setxattr};

use crate::{run_ok, text};

/// Makes a tree with every kind of object at `top`, which may be there. Root's has a device, an
/// attribute that root alone sees, and a file of another user, too.
///
/// # Panics
/// If the file system refuses one of them.
pub fn make_every_kind(top: &Path) {
    fs::create_dir_all(top.join("d/e/f")).expect("there is room");
    fs::create_dir(top.join("empty")).expect("there is room");
    make_files(top);
    symlink("d/one", top.join("link")).expect("there is room");
    symlink("x\n".repeat(2000), top.join("long link")).expect("there is room");
    fs::create_dir(top.join("n\n".repeat(100))).expect("there is room");
    fs::hard_link(top.join("d/two"), top.join("hard")).expect("there is room");
    fs::hard_link(top.join("d/two"), top.join("d/e/hard")).expect("there is room");
    mknodat(CWD, top.join("pipe"), FileType::Fifo, Mode::RUSR, 0).expect("anyone may");
    let modes = [
        ("d/one", 0o4711),
        ("d/e/f", 0o2555),
        ("empty", 0o1777),
        ("d/two", 0o600),
    ];
    for (name, mode) in modes {
        fs::set_permissions(top.join(name), PermissionsExt::from_mode(mode)).expect("ours");
    }
    let set = |name: &str, key: &str, value: &[u8]| {
        setxattr(top.join(name), key, value, XattrFlags::empty()).expect("ours");
    };
    set("d/one", "user.a", b"value");
    set("d", "user.b", &[9; 2000]);
    set("d", "user.c", b"of two\nlines");
    run_ok("setfacl", &["-m", "u:5:r,u:10:r", text(&top.join("d/two"))]);
    run_ok("setfacl", &["-dm", "g:7:rx", text(&top.join("empty"))]);
    run_ok("setfacl", &["-dm", "g:7:rx", text(&top.join("d/e"))]);
    if rustix::process::geteuid().is_root() {
        rustix::fs::chown(top.join("none"), Some(Uid::from_raw(1234)), None).expect("root may");
        let (kind, device) = (FileType::CharacterDevice, rustix::fs::makedev(1, 3));
        mknodat(CWD, top.join("null"), kind, Mode::RUSR, device).expect("root may");
        set("d/e", "trusted.c", b"kept");
    }
    let times = [
        ("1969-12-31 23:00:00.25", "d/one"),
        ("2001-02-03 04:05:06.123456789", "d/e"),
    ];
    for (time, name) in times {
        run_ok("touch", &["-hd", time, text(&top.join(name))]);
    }
}

fn make_files(top: &Path) {
    let sized = [
        ("one", 1),
        ("block", 4096),
        ("two", 5000),
        ("large", 3 << 20),
    ];
    for (name, len) in sized {
        let bytes: Vec<u8> = (0..len).map(|at: u32| (at / 7) as u8).collect();
        fs::write(top.join("d").join(name), bytes).expect("there is room");
    }
    for number in 0..300 {
        let name = format!("d/e/{number}-{}", "n".repeat(number % 200));
        fs::write(top.join(name), vec![7; number * 97]).expect("there is room");
    }
    for odd in [&b"\x01"[..], b"\xff\xfe", b"a b\nc", &[b'x'; 255]] {
        fs::write(top.join(OsStr::from_bytes(odd)), odd).expect("there is room");
    }
    fs::write(top.join("none"), "").expect("there is room");
    let sparse = File::create(top.join("sparse")).expect("there is room");
    sparse.write_all_at(b"middle", 70 << 20).expect("as above");
    sparse.set_len(100 << 20).expect("as above");
}

/// Asserts that rsync finds nothing to do: contents, modes, owners, times, links, lists, attributes.
///
/// # Panics
/// If it finds something.
pub fn assert_same(a: &Path, b: &Path) {
    let (a, b) = (format!("{}/", text(a)), format!("{}/", text(b)));
    let options = ["-naicAXH", "--specials", "--devices", "--delete"];
    let differing = run_ok("rsync", &[&options[..], &[&a, &b]].concat());
    assert_eq!(differing, "", "{a} and {b}");
}
