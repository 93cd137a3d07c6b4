"""Changes below a view of a snapshot: each must end with EROFS. Prints one line for each other end.

views.py DIR: DIR/file, DIR/dir and DIR/link are in the view.
"""
import ctypes, errno, fcntl, mmap, os, sys

top = sys.argv[1]
file, directory, link = (os.path.join(top, name) for name in ("file", "dir", "link"))
libc = ctypes.CDLL(None, use_errno=True)


def call(name, *args):
    args = [arg.encode() if isinstance(arg, str) else arg for arg in args]
    if getattr(libc, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)


def stored():
    fd = os.open(file, os.O_RDWR)
    pages = mmap.mmap(fd, 4, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    pages[0:4] = b"lost"
    pages.flush()


def on_open_file(change):
    fd = os.open(file, os.O_RDONLY)
    try:
        change(fd)
    finally:
        os.close(fd)


def mapped_for_reading():
    """A mapping of a file that is open for reading takes no stores."""
    fd = os.open(file, os.O_RDONLY)
    try:
        mmap.mmap(fd, 4, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except PermissionError:
        raise OSError(errno.EROFS, "not writable") from None
    finally:
        os.close(fd)


FS_IOC_SETFLAGS = 0x40086602
CHANGES = {
    "open for writing": lambda: os.open(file, os.O_WRONLY),
    "open for both": lambda: os.open(file, os.O_RDWR),
    "open for appending": lambda: os.open(file, os.O_WRONLY | os.O_APPEND),
    "open and truncate": lambda: os.open(file, os.O_RDONLY | os.O_TRUNC),
    "open a new file": lambda: os.open(os.path.join(top, "new"), os.O_CREAT | os.O_WRONLY),
    "open without a name": lambda: os.open(top, os.O_TMPFILE | os.O_RDWR),
    "map for stores": stored,
    "map a file that is open for reading": mapped_for_reading,
    "truncate": lambda: os.truncate(file, 1),
    "mkdir": lambda: os.mkdir(os.path.join(top, "new")),
    "mknod": lambda: os.mkfifo(os.path.join(top, "new")),
    "symlink": lambda: os.symlink("x", os.path.join(top, "new")),
    "link": lambda: os.link(file, os.path.join(top, "new")),
    "unlink": lambda: os.unlink(file),
    "rmdir": lambda: os.rmdir(directory),
    "rename": lambda: os.rename(file, os.path.join(top, "new")),
    "rename over": lambda: os.rename(link, file),
    "exchange": lambda: call("renameat2", -100, file, -100, link, 2),
    "chmod": lambda: os.chmod(file, 0o777),
    "chown": lambda: os.lchown(link, os.getuid(), os.getgid()),
    "utimes": lambda: os.utime(file, (1, 1)),
    "setxattr": lambda: os.setxattr(file, "user.new", b"x"),
    "removexattr": lambda: os.removexattr(file, "user.old"),
    "set a list": lambda: os.setxattr(file, "system.posix_acl_access", b"\x02\0\0\0"),
    "set flags": lambda: on_open_file(
        lambda fd: fcntl.ioctl(fd, FS_IOC_SETFLAGS, (0x10).to_bytes(8, "little"))
    ),
}

for name, change in CHANGES.items():
    try:
        change()
    except OSError as error:
        # A user who could not change the file then is told so first.
        if error.errno == errno.EROFS:
            continue
        print(f"{name}: {errno.errorcode.get(error.errno, error.errno)}")
    else:
        print(f"{name}: done")
print(f"{len(CHANGES)} changes tried")
