//! chattr(1) and lsattr(1): flags are kept, and protect as on ext4.
//!
//! `flags.py` makes the calls and prints a line for each.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Output};

use ramet_e2e::{Bed, Ext4, ramet_bin, run, run_ok};

/// Options of the two ways on which requests come.
const TRANSPORTS: [&str; 2] = ["no_io_uring", "io_uring"];
/// Lines that the script prints at least.
const LINES_MIN: usize = 300;

fn lines(dir: &Path) -> Vec<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/flags.py");
    let out = run_ok("python3", &[&script, dir]);
    out.lines().map(String::from).collect()
}

/// Runs a script in a directory; it fails by an exit status.
fn python(dir: &Path, script: &str) {
    let mut python = Command::new("python3");
    let python = python.args(["-c", script]).current_dir(dir);
    let out = python.output().expect("./test installs python3");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("not root: nothing can be protected");
    }
    is_root
}

#[test]
fn protected_files_and_directories_refuse_what_ext4_refuses() {
    if !is_root() {
        return;
    }
    let bed = Bed::new("1G");
    bed.command_for_others();
    let other = Ext4::new(&bed);
    let expected = lines(other.root());
    assert!(expected.len() >= LINES_MIN, "{}", expected.len());
    for transport in TRANSPORTS {
        let mount = bed.mount(&["-o", transport]);
        let found = lines(mount.root());
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found, expected, "ext4 is on the right");
        }
        mount.umount();
        bed.fsck();
    }
}

fn sh(dir: &Path, script: &str) -> Output {
    let mut shell = Command::new("sh");
    let shell = shell.args(["-c", script]).current_dir(dir);
    shell.output().expect("sh runs")
}

/// Clones are not protected. Trees with protected files are neither removed nor replaced, by root
/// either. All of that is so after a crash as well.
#[test]
fn clones_begin_unprotected_and_protected_trees_stay() {
    if !is_root() {
        return;
    }
    let bed = Bed::new("1G");
    for transport in TRANSPORTS {
        let mount = bed.mount(&["-o", transport]);
        let root = &bed.mount_point();
        let ok = |script: &str| {
            let out = sh(root, script);
            let said = String::from_utf8_lossy(&out.stderr);
            assert!(out.status.success(), "{script}: {said}");
        };
        ok("mkdir -p tree/deep other; echo text > tree/deep/file; chattr +i tree/deep/file");
        run_ok(ramet_e2e::ramet_bin(), &["sync".as_ref(), root.as_os_str()]);
        mount.kill_daemon();
        mount.detach_dead();
        let mount = bed.mount(&["-o", transport]);
        let (tree, clone) = (root.join("tree"), root.join("clone"));
        mount.clone_path(&tree, &clone);
        ok("echo more >> clone/deep/file; lsattr clone/deep/file | grep -qv i.*clone");
        mount.remove(&clone);
        let ramet = |args: [&str; 3]| {
            let paths = args[1..].iter().filter(|path| !path.is_empty());
            let paths = paths.map(|path| root.join(path).into_os_string());
            let args: Vec<_> = [args[0].into()].into_iter().chain(paths).collect();
            run(ramet_e2e::ramet_bin(), &args)
        };
        for refused in [["rm", "tree", ""], ["rm", "tree/deep/file", ""]] {
            let out = ramet(refused);
            let said = String::from_utf8_lossy(&out.stderr);
            assert!(
                !out.status.success() && said.contains("immutable"),
                "{said}"
            );
        }
        let replace: [&OsStr; 2] = ["clone".as_ref(), "--replace".as_ref()];
        let other = root.join("other");
        let paths: [&OsStr; 2] = [other.as_ref(), tree.as_ref()];
        let out = run(ramet_e2e::ramet_bin(), &[replace, paths].concat());
        assert!(!out.status.success());
        ok("mv tree other/tree; chattr -i other/tree/deep/file");
        mount.remove(&root.join("other"));
        mount.umount();
        bed.fsck();
    }
}

/// Pages that were stored before a file is protected are kept, and those stored afterwards are not
/// shown for long.
#[test]
fn pages_stored_before_a_file_is_protected_are_kept() {
    if !is_root() {
        return;
    }
    let bed = Bed::new("1G");
    for transport in TRANSPORTS {
        let mount = bed.mount(&["-o", transport]);
        let script = r#"
import mmap, os, subprocess, time
with open("mapped", "wb") as file: file.write(b"a" * 8192)
fd = os.open("mapped", os.O_RDWR)
pages = mmap.mmap(fd, 8192)
pages[0:4] = b"kept"
subprocess.run(["chattr", "+i", "mapped"], check=True)
pages[4096:4100] = b"lost"
try: pages.flush()
except OSError: pass
else: raise SystemExit("a protected file took a page")
deadline = time.monotonic() + 30
while (found := open("mapped", "rb").read()) != b"kept" + b"a" * 8188:
    if time.monotonic() > deadline: raise SystemExit(str(found[4090:4104]))
    time.sleep(0.05)
"#;
        python(mount.root(), script);
        run_ok(
            "chattr",
            &["-i".into(), mount.root().join("mapped").into_os_string()],
        );
        mount.umount();
        bed.fsck();
    }
}

/// `lsattr -v` tells the generation that a handle of the kernel has, of files and of directories,
/// and it differs from file to file.
#[test]
fn lsattr_tells_the_generation_of_handles() {
    if !is_root() {
        return;
    }
    let bed = Bed::new("1G");
    for transport in TRANSPORTS {
        let mount = bed.mount(&["-o", transport]);
        let script = r#"
import ctypes, os, struct, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def of_handle(path):
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 136)
    mount = ctypes.c_int()
    flags = ctypes.c_int(0)
    assert libc.name_to_handle_at(-100, path.encode(), handle, ctypes.byref(mount), flags) == 0
    return struct.unpack_from("III", handle.raw, 8)[2]
def of_lsattr(path):
    out = subprocess.run(["lsattr", "-dv", path], check=True, capture_output=True, text=True).stdout
    return int(out.split()[0])
os.makedirs("directory", exist_ok=True)
seen = set()
for path in ["directory", "one", "two"]:
    if path != "directory": open(path, "w").close()
    found, expected = of_lsattr(path), of_handle(path)
    assert found == expected, (path, found, expected)
    seen.add(found)
assert len(seen) > 1, seen
"#;
        python(mount.root(), script);
        mount.umount();
    }
}

#[test]
fn the_label_of_a_volume_is_told_to_programs() {
    let bed = Bed::without_volume();
    let volume = bed.volume();
    for label in ["", "Bücher"] {
        let args = ["mkfs", "--force", "--size", "64M", "-L", label].map(OsStr::new);
        run_ok(ramet_bin(), &[&args[..], &[volume.as_os_str()]].concat());
        for transport in TRANSPORTS {
            let mount = bed.mount(&["-o", transport]);
            let script = r#"
import fcntl, os, sys
os.makedirs("directory", exist_ok=True)
open("file", "w").close()
for path in [".", "directory", "file"]:
    fd = os.open(path, os.O_RDONLY)
    found = fcntl.ioctl(fd, 0x81009431, b"\xff" * 256)
    assert found == LABEL.encode().ljust(256, b"\0"), (path, found)
    os.close(fd)
"#;
            python(
                mount.root(),
                &script.replace("LABEL", &format!("{label:?}")),
            );
            mount.umount();
        }
    }
}
