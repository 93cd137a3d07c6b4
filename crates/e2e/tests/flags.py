"""Protects files and directories by chattr, tries every change, and prints a line for each.

Usage: flags.py DIR, as root. Two file systems that agree print the same lines.
"""

import ctypes
import errno
import fcntl
import os
import shutil
import struct
import subprocess
import sys
import time

GET, SET, GET_X, SET_X = 0x80086601, 0x40086602, 0x801C581F, 0x401C5820
OURS = 0x10 | 0x20 | 0x40 | 0x80
libc = ctypes.CDLL(None, use_errno=True)


def flags(path):
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return struct.unpack("i", fcntl.ioctl(fd, GET, b"\0" * 4))[0] & OURS
    finally:
        os.close(fd)


def set_flags(path, bits):
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        # Other bits of ext4, such as that of extents, stay.
        others = struct.unpack("i", fcntl.ioctl(fd, GET, b"\0" * 4))[0] & ~OURS
        fcntl.ioctl(fd, SET, struct.pack("i", bits | others))
    finally:
        os.close(fd)


def xflags(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        return struct.unpack("I", fcntl.ioctl(fd, GET_X, b"\0" * 28)[:4])[0] & 0xD8
    finally:
        os.close(fd)


def set_xflags(path, bits):
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, SET_X, struct.pack("I24x", bits))
    finally:
        os.close(fd)


def call(number):
    """The errno of a call of libc that answered `number`."""
    if number < 0:
        raise OSError(ctypes.get_errno(), "")


def write(path, opened=0, at=None):
    fd = os.open(path, os.O_WRONLY | opened)
    try:
        if at is not None:
            os.pwrite(fd, b"more", at)
        else:
            os.write(fd, b"more")
    finally:
        os.close(fd)


def with_fd(path, opened, then):
    fd = os.open(path, opened)
    try:
        then(fd)
    finally:
        os.close(fd)


def fallocate(mode):
    return lambda path: with_fd(
        path, os.O_WRONLY | os.O_APPEND, lambda fd: call(libc.fallocate(fd, mode, ctypes.c_long(0), ctypes.c_long(4096)))
    )


def copy_range(path):
    source = os.open("/proc/self/exe", os.O_RDONLY)
    other = os.path.join(os.path.dirname(path), "source")
    os.close(source)
    from_fd, to_fd = os.open(other, os.O_RDONLY), os.open(path, os.O_WRONLY)
    try:
        os.copy_file_range(from_fd, to_fd, 4)
    finally:
        os.close(from_fd)
        os.close(to_fd)


def rename2(old, new, how):
    call(libc.renameat2(-100, old.encode(), -100, new.encode(), how))


LIST = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", tag, perm, 0xFFFFFFFF) for tag, perm in [(1, 7), (4, 5), (32, 1)]
)
OF_FILES = {
    "write": write,
    "append": lambda path: write(path, os.O_APPEND),
    "pwrite": lambda path: write(path, 0, 1),
    "truncate": lambda path: os.truncate(path, 1),
    "open truncating": lambda path: with_fd(path, os.O_WRONLY | os.O_TRUNC, lambda fd: None),
    "ftruncate": lambda path: with_fd(path, os.O_RDWR, lambda fd: os.ftruncate(fd, 9000)),
    "allocate": fallocate(0),
    "allocate, keep size": fallocate(1),
    "punch": fallocate(3),
    "zero": fallocate(16),
    "copy_file_range": copy_range,
    "link": lambda path: os.link(path, path + ".link"),
    "unlink": os.unlink,
    "read": lambda path: with_fd(path, os.O_RDONLY, lambda fd: os.read(fd, 4)),
}
OF_ALL = {
    "chmod": lambda path: os.chmod(path, 0o711),
    "chown": lambda path: os.chown(path, 1, 1),
    "touch": lambda path: os.utime(path),
    "utime": lambda path: os.utime(path, (5, 5)),
    "setxattr": lambda path: os.setxattr(path, "user.a", b"b"),
    "setxattr trusted": lambda path: os.setxattr(path, "trusted.a", b"b"),
    "removexattr": lambda path: os.removexattr(path, "user.there"),
    "set list": lambda path: os.setxattr(path, "system.posix_acl_access", LIST),
    "rename": lambda path: os.rename(path, path + ".moved"),
    # The kernel itself compares the kinds, before or after it finds a protected target.
    "rename over": lambda path: os.rename(
        os.path.dirname(path) + ("/empty" if os.path.isdir(path) else "/source"), path
    ),
    "exchange": lambda path: rename2(path, os.path.dirname(path) + "/source", 2),
    "exchange back": lambda path: rename2(os.path.dirname(path) + "/source", path, 2),
    "rmtree": lambda path: shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path),
}
OF_DIRS = {
    "create": lambda path: with_fd(path + "/new", os.O_CREAT | os.O_WRONLY, lambda fd: None),
    "open there": lambda path: with_fd(path + "/file", os.O_CREAT | os.O_WRONLY, lambda fd: None),
    "mkdir": lambda path: os.mkdir(path + "/new"),
    "mkdir there": lambda path: os.mkdir(path + "/sub"),
    "mknod": lambda path: os.mkfifo(path + "/new"),
    "symlink": lambda path: os.symlink("x", path + "/new"),
    "link into": lambda path: os.link(os.path.dirname(path) + "/source", path + "/new"),
    "tmpfile": lambda path: with_fd(path, os.O_TMPFILE | os.O_RDWR, lambda fd: None),
    "unlink in": lambda path: os.unlink(path + "/file"),
    "unlink none": lambda path: os.unlink(path + "/none"),
    "rmdir in": lambda path: os.rmdir(path + "/sub"),
    "rmdir full": os.rmdir,
    "rename in": lambda path: os.rename(path + "/file", path + "/moved"),
    "rename out": lambda path: os.rename(path + "/file", os.path.dirname(path) + "/out"),
    "rename into": lambda path: os.rename(os.path.dirname(path) + "/source", path + "/into"),
    "rename over": lambda path: os.rename(os.path.dirname(path) + "/source", path + "/file"),
    "write in": lambda path: write(path + "/file"),
    "list": os.listdir,
}


def prepared(base, kind):
    """A file or directory to be protected, with others beside it."""
    os.mkdir(base)
    for name in ["source", "target"]:
        with open(f"{base}/{name}", "w") as file:
            file.write("text")
    os.mkdir(base + "/empty")
    path = base + "/target"
    if kind == "dir":
        os.unlink(path)
        os.mkdir(path)
        os.mkdir(path + "/sub")
        open(path + "/file", "w").close()
    os.setxattr(path, "user.there", b"")
    return path


def clean(base):
    for root, dirs, files in os.walk(base):
        for name in dirs + files:
            if not os.path.islink(path := os.path.join(root, name)) and (
                os.path.isfile(path) or os.path.isdir(path)
            ):
                set_flags(path, 0)
    shutil.rmtree(base)


def main():
    top = sys.argv[1]
    base = top + "/case"
    for kind in ["file", "dir"]:
        changes = OF_ALL | (OF_FILES if kind == "file" else OF_DIRS)
        for bits in [0, 0x10, 0x20, 0x30, 0xC0]:
            for name, change in changes.items():
                path = prepared(base, kind)
                set_flags(path, bits)
                try:
                    change(path)
                    result = "done"
                except OSError as error:
                    result = errno.errorcode[error.errno]
                there = flags(path) if os.path.exists(path) else None
                print(kind, hex(bits), name, result, there)
                clean(base)
    path = prepared(base, "file")
    for bits in [0x8, 0x10, 0x40, 0x80, 0xD8, 0]:
        set_xflags(path, bits)
        print(hex(xflags(path)), hex(flags(path)))
    for option in ["+i", "-i", "+aA", "-a", "+d", "-dA"]:
        subprocess.run(["chattr", option, path], check=True)
        listed = subprocess.run(["lsattr", path], check=True, capture_output=True, text=True)
        print(option, [letter for letter in "iaAd" if letter in listed.stdout.split()[0]])
    # A change of flags is a change of the file, and its status tells that.
    for changed in [path, base + "/empty"]:
        for bits in [0x80, 0xC0, 0]:
            before = os.stat(changed).st_ctime_ns
            time.sleep(0.05)
            set_flags(changed, bits)
            print(hex(bits), "changed", os.stat(changed).st_ctime_ns > before)
    # An ordinary user who owns a file sets flags, but does not protect it.
    os.chown(path, 1234, 1234)
    os.chmod(base, 0o777)
    for user, bits in [(1234, 0x40), (1234, 0x10), (1234, 0x20), (4321, 0x80), (1234, 0)]:
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            try:
                set_flags(path, bits)
            except OSError as error:
                os._exit(error.errno)
            os._exit(0)
        print(user, hex(bits), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flags(path))
    set_flags(path, 0x10)
    child = os.fork()
    if child == 0:
        os.setuid(1234)
        try:
            set_flags(path, 0)
        except OSError as error:
            os._exit(error.errno)
        os._exit(0)
    print("unprotect", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flags(path))
    inherited(base)
    clean(base)


def inherited(base):
    set_flags(base + "/empty", 0xE0)
    os.mkdir(base + "/empty/dir")
    open(base + "/empty/file", "w").close()
    print("inherited", flags(base + "/empty/dir"), flags(base + "/empty/file"))


main()
