//! Features of Linux beyond reading and writing: files without a name, times of creation, many and
//! large attributes, idmapped mounts, capabilities, and copies of ranges.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};

use ramet_e2e::{Bed, run_ok};

/// Runs a script of Python in a directory, and answers its output.
fn python(dir: &Path, script: &str) -> String {
    python_with::<&str>(dir, script, &[])
}

/// The same with arguments.
fn python_with<S: AsRef<OsStr>>(dir: &Path, script: &str, arguments: &[S]) -> String {
    let mut python = Command::new("python3");
    let python = python
        .args(["-c", script])
        .args(arguments)
        .current_dir(dir)
        .stdin(Stdio::null());
    let out = python.output().expect("./test installs python3");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    String::from_utf8_lossy(&out.stdout).into_owned()
}

#[test]
fn a_file_without_a_name_gets_one_or_goes() {
    let bed = Bed::new("1G");
    let mount = bed.mount(&[]);
    let root = mount.root();
    let script = r#"
import os, errno
os.mkdir("d"); os.umask(0o027)
def nameless(flags=0):
    fd = os.open("d", os.O_TMPFILE | os.O_RDWR | flags, 0o666)
    os.write(fd, b"x" * 5000)
    return fd
def link(fd, name):
    os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=0, follow_symlinks=True)
fd = nameless()
before = os.fstat(fd)
assert (before.st_nlink, oct(before.st_mode)) == (0, "0o100640"), before
assert os.listdir("d") == []
link(fd, "d/named")
after = os.fstat(fd)
assert (after.st_nlink, after.st_ino) == (1, before.st_ino)
os.write(fd, b"more")
link(fd, "again")
assert os.stat("d/named").st_nlink == 2
os.unlink("again")
large = nameless()
os.pwrite(large, b"y" * 3_000_000, 1_000_000)
link(large, "large")
other = nameless()
for name in ["d/named", "large"]:
    try: link(other, name)
    except FileExistsError: continue
    raise SystemExit("it replaced a file")
fixed = nameless(os.O_EXCL)
try: link(fixed, "fixed")
except FileNotFoundError: pass
gone = os.open(".", os.O_TMPFILE | os.O_WRONLY, 0o600)
os.setxattr(gone, "user.a", b"b")
os.write(gone, b"z" * 2_000_000)
link(gone, "marked")
assert os.getxattr("marked", "user.a") == b"b"
os.unlink("marked")
"#;
    python(root, script);
    let named = std::fs::read(root.join("d/named")).expect("it has a name");
    assert_eq!((named.len(), &named[5000..]), (5004, &b"more"[..]));
    assert_eq!(
        root.join("large").metadata().expect("named").len(),
        4_000_000
    );
    mount.umount();
    bed.fsck();
    // After a crash a file without a name is gone, and a named one is whole.
    let mount = bed.mount(&[]);
    let script = r#"
import os
fd = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
os.write(fd, b"x" * 2_000_000)
os.link(f"/proc/self/fd/{fd}", "kept", src_dir_fd=0, follow_symlinks=True)
lost = os.open(".", os.O_TMPFILE | os.O_RDWR, 0o600)
os.write(lost, b"x" * 2_000_000)
os.fsync(lost)
"#;
    python(mount.root(), script);
    mount.kill_daemon();
    mount.detach_dead();
    let mount = bed.mount(&[]);
    let kept = std::fs::read(mount.root().join("kept")).expect("it was synced");
    assert!(kept == vec![b'x'; 2_000_000]);
    mount.umount();
    bed.fsck();
}

#[test]
fn statx_tells_the_time_of_creation_and_attributes_may_be_many_and_large() {
    let bed = Bed::new("1G");
    let mount = bed.mount(&[]);
    let script = r#"
import os, subprocess
open("f", "w").close()
def born(): return float(subprocess.run(["stat", "-c", "%.9W", "f"], capture_output=True).stdout)
first = born()
assert abs(first - os.stat("f").st_ctime) < 1, first
os.utime("f", (7, 7))
open("f", "w").write("text")
assert born() == first and first > 7
large = bytes(range(256)) * 256
os.setxattr("f", "user.large", large)
assert os.getxattr("f", "user.large") == large
names = {f"user.{number:04}" for number in range(1000)}
for name in names: os.setxattr("f", name, name.encode())
assert set(os.listxattr("f")) == names | {"user.large"}
assert all(os.getxattr("f", name) == name.encode() for name in names)
"#;
    python(mount.root(), script);
    mount.umount();
    bed.fsck();
}

/// Makes an idmapped mount of a directory on another one: numbers from 0 on are shown from 100,000
/// on. The kernel's headers name the calls by number.
const IDMAPPED: &str = r#"
import ctypes, os, signal, struct
libc = ctypes.CDLL(None, use_errno=True)
def idmapped(source, target):
    ready, wait = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        libc.unshare(0x10000000)
        os.write(ready[1], b"x")
        os.read(wait[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    for kind in ["uid", "gid"]:
        with open(f"/proc/{child}/{kind}_map", "w") as file: file.write("0 100000 65536")
    space = os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
    tree = libc.syscall(428, -100, source.encode(), 0x80001)
    attr = struct.pack("QQQQ", 0x100000, 0, 0, space)
    done = libc.syscall(442, tree, b"", 0x1000, attr, len(attr))
    assert done == 0, os.strerror(ctypes.get_errno())
    assert libc.syscall(429, tree, b"", -100, target.encode(), 4) == 0
    os.write(wait[1], b"x")
    os.waitpid(child, 0)
"#;

#[test]
fn an_idmapped_mount_shows_and_stores_other_owners() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: nothing can be idmapped");
        return;
    }
    let bed = Bed::new("1G");
    bed.command_for_others();
    let mount = bed.mount(&[]);
    let target = bed.path().join("idmapped");
    std::fs::create_dir(&target).expect("the folder is new");
    let script = format!(
        "{IDMAPPED}
target = {target:?}
os.mkdir('d'); open('d/roots', 'w').close(); os.chmod('d', 0o755)
open('d/users', 'w').close(); os.chown('d/users', 1000, 1001)
os.setxattr('d/roots', 'trusted.a', b'b')
os.setxattr('d/roots', 'user.a', b'b')
idmapped(os.path.abspath('d'), target)
def owner(path): return os.stat(path).st_uid, os.stat(path).st_gid
assert owner(target + '/roots') == (100000, 100000), owner(target + '/roots')
assert owner(target + '/users') == (101000, 101001)
child = os.fork()
if child == 0:
    os.setgroups([]); os.setgid(100000); os.setuid(100000)
    open(target + '/new', 'w').write('text')
    os.mkdir(target + '/dir'); os.symlink('x', target + '/link'); os.mkfifo(target + '/fifo')
    os.rename(target + '/new', target + '/moved')
    os.chmod(target + '/moved', 0o2711); os.unlink(target + '/fifo')
    os.truncate(target + '/moved', 2)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
for name in ['moved', 'dir', 'link']:
    assert os.lstat('d/' + name).st_uid == 0 and os.lstat('d/' + name).st_gid == 0, name
assert open('d/moved').read() == 'te'
try: open(target + '/roots2', 'w'); raise SystemExit('root is nobody there')
except OSError as error: assert error.errno == 75, error
# Requests without a user do not take root's rights away, nor give them to others.
assert 'trusted.a' in os.listxattr('d/roots')
child = os.fork()
if child == 0:
    os.setgroups([]); os.setgid(1000); os.setuid(1000)
    os._exit(os.listxattr('d/roots') != ['user.a'])
assert os.waitpid(child, 0)[1] == 0
"
    );
    python(mount.root(), &script);
    mount.clone_path(&mount.root().join("d"), &mount.root().join("e"));
    run_ok("umount", &[&target]);
    mount.umount();
    bed.fsck();
}

/// Root in a container has some capabilities, and a service may have some without being root.
#[test]
fn capabilities_decide_who_clones_and_removes_trees_of_others() {
    if !rustix::process::geteuid().is_root() {
        println!("not root: no capabilities to give");
        return;
    }
    let bed = Bed::new("1G");
    let bin = bed.command_for_others();
    let mount = bed.mount(&[]);
    let script = "import os
os.chmod('.', 0o777)
for name, uid in [('theirs', 1234), ('roots', 0)]:
    os.mkdir(name); open(name + '/f', 'w').write('text'); os.chown(name, uid, uid)
";
    python(mount.root(), script);
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let run = |who: &[&str], args: [&str; 3]| {
        let paths = args[1..].iter().filter(|path| !path.is_empty());
        let out = Command::new("setpriv")
            .args(who)
            .arg(&bin)
            .arg(args[0])
            .args(paths)
            .current_dir(mount.root())
            .output()
            .expect("util-linux is everywhere");
        out.status.success()
    };
    let without = ["--bounding-set=-all", "--inh-caps=-all"];
    assert!(run(&without, ["clone", "roots", "a"]), "its own");
    assert!(!run(&without, ["clone", "theirs", "b"]), "uid 0 alone");
    assert!(!run(&without, ["rm", "theirs", ""]), "uid 0 alone");
    let all = "+chown,+dac_override,+fowner";
    let (inherited, ambient) = (format!("--inh-caps={all}"), format!("--ambient-caps={all}"));
    let with = [&user[..], &[&inherited, &ambient]].concat();
    assert!(!run(&user, ["clone", "theirs", "b"]));
    assert!(run(&with, ["clone", "theirs", "b"]));
    assert!(!run(&user, ["rm", "theirs", ""]));
    assert!(run(&with, ["rm", "theirs", ""]));
    // Root of another user namespace has all capabilities there, and none here.
    let mut unshared = Command::new("unshare");
    let unshared = unshared.args(["--user", "--map-root-user"]).arg(&bin);
    let unshared = unshared.args(["rm", "b"]).current_dir(mount.root());
    std::os::unix::process::CommandExt::uid(unshared, 65534);
    let out = unshared.output().expect("util-linux is everywhere");
    assert!(!out.status.success(), "root of another namespace");
    assert!(mount.root().join("b/f").exists());
    mount.umount();
    bed.fsck();
}

/// Copies ranges to distances of blocks that are no multiples of a MiB. The arguments are the
/// source, the target, the length of the range and its place in the target.
const COPY: &str = r#"
import os, sys
source, target, length, start = *sys.argv[1:3], *map(int, sys.argv[3:])
fds = [os.open(name, os.O_RDWR | os.O_CREAT) for name in (source, target)]
at = 0
while at < length:
    count = os.copy_file_range(*fds, length - at, at, start + at)
    assert count > 0, at
    at += count
"#;

/// Compares those ranges with the source. The arguments are the length, and names with places.
const COMPARE: &str = r#"
import sys
def part(name, start, length=int(sys.argv[1])):
    with open(name, "rb") as file:
        file.seek(start)
        return file.read(length)
source = part("source", 0)
assert len(source) == int(sys.argv[1]) and any(source[:8])
for name, start in zip(sys.argv[2::2], sys.argv[3::2]):
    assert part(name, int(start)) == source, (name, start)
assert not any(part("other", 0, 4096))
"#;

#[test]
fn copy_file_range_shares_blocks_at_any_distance_of_blocks() {
    let (block, mib, len) = (4096, 1 << 20, 64 << 20);
    let copies: [(&str, u64); 4] = [
        ("other", block),
        ("other", len + 3 * block + mib),
        ("source", len + block),
        ("source", 2 * len + 5 * block + mib),
    ];
    let mut compared = vec![len.to_string()];
    compared.extend(
        copies
            .iter()
            .flat_map(|(name, start)| [(*name).to_owned(), start.to_string()]),
    );
    for transport in ["no_io_uring", "io_uring"] {
        let bed = Bed::new("2G");
        let mount = bed.mount(&["-o", transport]);
        let noise = format!("open('source', 'wb').write(__import__('os').urandom({len}))");
        python(mount.root(), &noise);
        let mut before = mount.allocated_settled();
        for (name, start) in copies {
            let arguments = ["source", name, &len.to_string(), &start.to_string()];
            python_with(mount.root(), COPY, &arguments);
            let now = mount.allocated_settled();
            println!("{transport}, {name} at {start}: {before} bytes, then {now}");
            assert!(
                now < before + mib,
                "{name} at {start}: {before} bytes, then {now}"
            );
            before = now;
        }
        python_with(mount.root(), COMPARE, &compared);
        mount.umount();
        bed.fsck();
        let mount = bed.mount(&["-o", transport]);
        python_with(mount.root(), COMPARE, &compared);
        mount.umount();
    }
}
