//! FS_IOC_SHUTDOWN: the volume stops as in a power cut, and every call answers `EIO`.

use std::path::Path;
use std::process::Command;

use ramet_e2e::Bed;

/// The calls before and after the shutdown, whose value is the argument of the script.
const SCRIPT: &str = r#"
import errno, fcntl, mmap, os, struct, sys
value = int(sys.argv[1])
def shut_down(fd, value): fcntl.ioctl(fd, 0x8004587d, struct.pack("I", value))
def fails(call, *args):
    try: call(*args)
    except OSError as error: return error.errno
    return 0
root = os.open(".", os.O_RDONLY)
os.mkdir("dir")
with open("synced", "wb") as file:
    file.write(b"text"); file.flush(); os.fsync(file.fileno())
with open("answered", "wb") as file: file.write(b"text")
with open("mapped", "wb") as file: file.write(b"a" * 4096)
fd = os.open("mapped", os.O_RDWR)
pages = mmap.mmap(fd, 4096)
pages[:4] = b"kept"
assert os.pread(fd, 4, 0) == b"kept"
child = os.fork()
if child == 0:
    os.setuid(65534)
    os._exit(fails(shut_down, root, value))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == errno.EPERM
assert fails(shut_down, root, 3) == errno.EINVAL
assert os.listdir("dir") == []
shut_down(fd if value == 1 else root, value)
calls = {
    "stat": lambda: os.stat("synced"), "stat none": lambda: os.stat("none"),
    "open": lambda: open("synced"), "list": lambda: os.listdir("."),
    "list dir": lambda: os.listdir("dir"),
    "read": lambda: os.pread(fd, 4, 0), "write": lambda: os.pwrite(fd, b"x", 0),
    "truncate": lambda: os.ftruncate(fd, 1), "chmod": lambda: os.fchmod(fd, 0o600),
    "fsync": lambda: os.fsync(fd), "fsync dir": lambda: os.fsync(root),
    "mkdir": lambda: os.mkdir("new"), "unlink": lambda: os.unlink("synced"),
    "rename": lambda: os.rename("synced", "moved"), "link": lambda: os.link("synced", "linked"),
    "create": lambda: open("new", "w"), "getxattr": lambda: os.getxattr("synced", "user.a"),
    "setxattr": lambda: os.setxattr(fd, "user.a", b"b"), "listxattr": lambda: os.listxattr(fd),
    "allocate": lambda: os.posix_fallocate(fd, 0, 9000), "flags": lambda: fcntl.ioctl(fd, 0x80086601, b"0000"),
    "again": lambda: shut_down(fd, 0),
}
for name, call in calls.items():
    found = fails(call)
    assert found == errno.EIO, f"{name}: {found}"
"#;

fn python(dir: &Path, args: &[&str]) {
    let mut python = Command::new("python3");
    let python = python.arg("-c").args(args).current_dir(dir);
    let out = python.output().expect("./test installs python3");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
}

#[test]
fn volume_that_is_shut_down_answers_nothing_and_keeps_what_was_synced() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: nobody may shut a volume down");
        return;
    }
    for transport in ["no_io_uring", "io_uring"] {
        for (value, least) in [("0", 3), ("1", 2), ("2", 1)] {
            let bed = Bed::new("1G");
            bed.command_for_others();
            let mount = bed.mount(&["-o", transport]);
            python(mount.root(), &[SCRIPT, value]);
            mount.umount();
            let mount = bed.mount(&[]);
            let read = |name: &str| std::fs::read(mount.root().join(name)).unwrap_or_default();
            let mapped = [&b"kept"[..], &[b'a'; 4092]].concat();
            let kept = [
                read("synced") == b"text",
                read("answered") == b"text",
                read("mapped") == mapped,
            ];
            assert!(kept[..least].iter().all(|kept| *kept), "{value}: {kept:?}");
            mount.umount();
            bed.fsck();
        }
    }
}
