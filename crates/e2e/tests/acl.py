"""Does the same things with access control lists in a directory, and prints a line for each.

Usage: acl.py DIR STEP FIRST, as root. Each STEPth case is tried, from number FIRST on. Two file
systems that agree print the same lines.
"""

import errno
import itertools
import os
import stat
import struct
import sys

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
OWNER, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32
OWNER_ID, OWNER_GROUP = 1234, 4321

LISTS = {
    "minimal": [(OWNER, 6), (GROUP_OBJ, 4), (OTHER, 0)],
    "open": [(OWNER, 7), (GROUP_OBJ, 7), (OTHER, 7)],
    "user": [(OWNER, 7), (USER, 6, 2001), (GROUP_OBJ, 5), (MASK, 7), (OTHER, 1)],
    "masked": [(OWNER, 7), (USER, 7, 2001), (GROUP_OBJ, 7), (MASK, 4), (OTHER, 0)],
    "mask 0": [(OWNER, 7), (USER, 7, 2001), (GROUP_OBJ, 7), (MASK, 0), (OTHER, 5)],
    "group": [(OWNER, 6), (GROUP_OBJ, 0), (GROUP, 6, 3001), (MASK, 6), (OTHER, 4)],
    "refused": [(OWNER, 7), (USER, 0, 2001), (GROUP_OBJ, 7), (GROUP, 0, 3001), (MASK, 7), (OTHER, 7)],
    "many": [(OWNER, 7), (USER, 4, 2001), (USER, 2, 2002), (GROUP_OBJ, 1), (GROUP, 2, 3001),
             (GROUP, 4, 3002), (MASK, 7), (OTHER, 0)],
    "only mask": [(OWNER, 6), (GROUP_OBJ, 6), (MASK, 4), (OTHER, 4)],
}
# Bytes that are no list.
ODD = {
    "no mask": [(OWNER, 7), (USER, 7, 2001), (GROUP_OBJ, 7), (OTHER, 7)],
    "no owner": [(GROUP_OBJ, 7), (OTHER, 7)],
    "order": [(OWNER, 7), (OTHER, 7), (GROUP_OBJ, 7)],
    "twice": [(OWNER, 7), (OWNER, 7), (GROUP_OBJ, 7), (OTHER, 7)],
    "bits": [(OWNER, 9), (GROUP_OBJ, 7), (OTHER, 7)],
    "tag": [(OWNER, 7), (3, 7), (GROUP_OBJ, 7), (OTHER, 7)],
}
# User, group, further groups.
USERS = {
    "root": (0, 0, []),
    "owner": (OWNER_ID, 77, []),
    "in group": (2009, OWNER_GROUP, []),
    "named user": (2001, 77, []),
    "named user in both": (2001, OWNER_GROUP, [3001]),
    "named group": (2008, 77, [3001]),
    "two groups": (2002, 3001, [3002]),
    "other": (2007, 77, [78]),
}


def tried(*choices):
    """Each STEPth combination of these choices."""
    step, first = int(sys.argv[2]), int(sys.argv[3])
    return itertools.islice(itertools.product(*choices), first, None, step)


def encode(entries):
    def one(tag, perm, number=0xFFFFFFFF):
        return struct.pack("<HHI", tag, perm, number)

    return struct.pack("<I", 2) + b"".join(one(*entry) for entry in entries)


def attempt(call, *args):
    """The result of a call, or the name of its error."""
    try:
        return call(*args)
    except OSError as error:
        return errno.errorcode[error.errno]


def as_user(user, call):
    """The result of a call by another user: a short text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        uid, gid, groups = USERS[user]
        os.setgroups(groups)
        os.setgid(gid)
        os.setuid(uid)
        os.write(writer, str(attempt(call)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as text:
        said = text.read()
    os.waitpid(child, 0)
    return said


def shown(path):
    """Mode and lists of an object."""
    def listed(name):
        value = attempt(lambda: os.getxattr(path, name, follow_symlinks=False))
        return value if isinstance(value, str) else value.hex()

    mode = oct(os.lstat(path).st_mode)
    names = sorted(attempt(lambda: os.listxattr(path, follow_symlinks=False)))
    names = [name for name in names if name.startswith("system.")]
    return f"{mode} {listed(ACCESS)} {listed(DEFAULT)} {','.join(names)}"


def fresh(path, kind, mode):
    """A new object of the owner."""
    make(kind, path, 0o777)
    os.chown(path, OWNER_ID, OWNER_GROUP)
    os.chmod(path, mode)


def remove(path):
    if stat.S_ISDIR(os.lstat(path).st_mode):
        os.rmdir(path)
    else:
        os.unlink(path)


def make(kind, path, mode):
    if kind == "file":
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    elif kind == "node":
        os.mknod(path, stat.S_IFREG | mode)
    elif kind == "fifo":
        os.mkfifo(path, mode)
    elif kind == "directory":
        os.mkdir(path, mode)
    else:
        os.symlink("somewhere", path)


def inheritance(directory):
    """New objects in directories with each default list."""
    modes, umasks = [0o666, 0o777, 0o640, 0o2755, 0o000, 0o1770], [0o022, 0o077, 0o000]
    kinds = ["file", "node", "fifo", "directory", "link"]
    parent, new = os.path.join(directory, "parent"), os.path.join(directory, "parent", "new")
    cases = tried([None, *LISTS], [0o755, 0o2755], kinds, modes, umasks)
    for name, bits, kind, mode, umask in cases:
        fresh(parent, "directory", bits)
        if name:
            os.setxattr(parent, DEFAULT, encode(LISTS[name]))
        before = os.umask(umask)
        made = attempt(make, kind, new, mode)
        os.umask(before)
        yield f"inherit {name} {bits:o} {kind} {mode:o} {umask:o}: {made} {shown(new)}"
        if kind == "directory":
            below = os.path.join(new, "below")
            make("file", below, 0o666)
            yield f"  below: {shown(below)}"
            remove(below)
        remove(new)
        remove(parent)


def accesses(directory):
    """Accesses of each user to files with each list."""
    path = os.path.join(directory, "object")
    for name, kind, user, wanted in tried(LISTS, ["file", "directory"], USERS, range(8)):
        fresh(path, kind, 0o770)
        os.setxattr(path, ACCESS, encode(LISTS[name]))
        may = as_user(user, lambda: os.access(path, wanted, effective_ids=True))
        yield f"access {name} {kind} {user} {wanted}: {may}"
        remove(path)


def uses(directory):
    """Reading, writing, listing and changing by each user."""
    parent, path = os.path.join(directory, "parent"), os.path.join(directory, "parent", "object")
    for name, user in tried(LISTS, USERS):
        fresh(parent, "directory", 0o777)
        fresh(path, "file", 0o770)
        os.setxattr(path, ACCESS, encode(LISTS[name]))
        os.setxattr(parent, ACCESS, encode(LISTS[name]))
        other = os.path.join(parent, "other")
        calls = {
            "read": lambda: os.close(os.open(path, os.O_RDONLY)),
            "write": lambda: os.close(os.open(path, os.O_WRONLY)),
            "truncate": lambda: os.truncate(path, 5),
            "list": lambda: len(os.listdir(parent)),
            "make": lambda: os.close(os.open(other, os.O_CREAT | os.O_WRONLY)),
            "rename": lambda: os.rename(path, other),
            "chmod": lambda: os.chmod(other, 0o640),
            "set": lambda: os.setxattr(other, ACCESS, encode(LISTS["user"])),
            "get": lambda: os.getxattr(other, ACCESS).hex(),
            "unlink": lambda: os.unlink(other),
        }
        for what, call in calls.items():
            yield f"use {name} {user} {what}: {as_user(user, call)}"
        for left in os.listdir(parent):
            remove(os.path.join(parent, left))
        remove(parent)


def changes(directory):
    """Modes after lists, and lists after modes."""
    path = os.path.join(directory, "object")
    modes = [0o777, 0o640, 0o604, 0o070, 0o000, 0o2755, 0o4711, 0o1777]
    for name, kind, mode in tried(LISTS, ["file", "directory"], modes):
        fresh(path, kind, 0o6775)
        os.setxattr(path, ACCESS, encode(LISTS[name]))
        yield f"set {name} {kind}: {shown(path)}"
        os.chmod(path, mode)
        yield f"chmod {name} {kind} {mode:o}: {shown(path)}"
        os.setxattr(path, ACCESS, encode(LISTS["minimal"]))
        yield f"minimal {name} {kind} {mode:o}: {shown(path)}"
        os.setxattr(path, ACCESS, encode(LISTS[name]))
        gone = attempt(os.removexattr, path, ACCESS)
        yield f"remove {name} {kind} {mode:o}: {gone} {shown(path)}"
        again = attempt(os.removexattr, path, ACCESS)
        os.setxattr(path, ACCESS, encode(LISTS[name]))
        os.chown(path, 2002, 3002)
        yield f"chown {name} {kind} {mode:o}: {again} {shown(path)}"
        remove(path)


def setgid(directory):
    """Setgid after a list was set by each user."""
    path = os.path.join(directory, "object")
    modes, kinds = [0o2770, 0o6771, 0o2700], ["file", "directory"]
    for name, user, mode, kind, attribute in tried(LISTS, USERS, modes, kinds, [ACCESS, DEFAULT]):
        fresh(path, kind, mode)
        said = as_user(user, lambda: os.setxattr(path, attribute, encode(LISTS[name])))
        yield f"setgid {name} {user} {mode:o} {kind} {attribute}: {said} {shown(path)}"
        remove(path)


def odd(directory):
    """Lists that are refused."""
    path = os.path.join(directory, "object")
    kinds = ["file", "directory", "fifo", "link"]
    cases = tried(kinds, (LISTS | ODD).items(), [ACCESS, DEFAULT], [0, 3, -1, None])
    for kind, (name, entries), attribute, end in cases:
        make(kind, path, 0o770)
        value = encode(entries)[:end]
        said = attempt(lambda: os.setxattr(path, attribute, value, follow_symlinks=False))
        yield f"odd {kind} {name} {attribute} {end}: {said} {shown(path)}"
        remove(path)


def main():
    directory = sys.argv[1]
    os.chmod(directory, 0o755)
    os.umask(0)
    for part in [inheritance, accesses, uses, changes, setgid, odd]:
        for line in part(directory):
            print(line)


main()
