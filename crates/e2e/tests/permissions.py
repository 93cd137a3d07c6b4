"""Copies, replaces and removes files and trees as several users, and prints a line for each case.

Usage: permissions.py DIR [RAMET], as root. Without RAMET cp(1) and rm(1) do it, with it the command
of that path. A line is "done" or "refused" behind the case, with the number of files that belong to
somebody else than the user in what was copied.
"""

import itertools
import os
import shutil
import stat
import subprocess
import sys

OWNER, GROUP, MEMBER, OTHER = 1234, 4321, 2009, 2007
# User, group, further groups.
USERS = {
    "root": (0, 0, []),
    "owner": (OWNER, 77, []),
    "member": (MEMBER, 77, [GROUP]),
    "other": (OTHER, 77, []),
}
# Owner, group and mode of the directory that is changed.
DIRS = {
    "owner's": (OWNER, 77, 0o755),
    "root's": (0, 0, 0o755),
    "open": (0, 0, 0o777),
    "sticky": (0, 0, 0o1777),
    "owner's sticky": (OWNER, 77, 0o1777),
    "group's": (0, GROUP, 0o775),
    "closed": (OWNER, 77, 0o600),
}


def file(path, owner, mode):
    with open(path, "w") as made:
        made.write("text")
    os.chown(path, owner, owner)
    os.chmod(path, mode)


def tree(path, owner, mode, inner_owner, inner_mode):
    os.makedirs(path + "/sub")
    file(path + "/sub/file", inner_owner, 0o644)
    for name, its, bits in [(path + "/sub", inner_owner, inner_mode), (path, owner, mode)]:
        os.chown(name, its, its)
        os.chmod(name, bits)


def device(path, owner):
    os.mknod(path, stat.S_IFCHR | 0o644, os.makedev(1, 3))
    os.chown(path, owner, owner)


OBJECTS = {
    "file": lambda path: file(path, OWNER, 0o644),
    "private file": lambda path: file(path, OWNER, 0o600),
    "setuid file": lambda path: file(path, OWNER, 0o4755),
    "root's file": lambda path: file(path, 0, 0o644),
    "root's setuid file": lambda path: file(path, 0, 0o4755),
    "device": lambda path: device(path, OWNER),
    "tree": lambda path: tree(path, OWNER, 0o755, OWNER, 0o755),
    "tree with root's": lambda path: tree(path, OWNER, 0o755, 0, 0o755),
    "tree with root's closed": lambda path: tree(path, OWNER, 0o755, 0, 0o700),
    "root's tree": lambda path: tree(path, 0, 0o755, 0, 0o755),
    "root's open tree": lambda path: tree(path, 0, 0o777, 0, 0o777),
}


def command(how, source, target):
    if len(sys.argv) > 2:
        ramet = [sys.argv[2]]
        return {
            "clone": [ramet + ["clone", source, target]],
            "replace": [ramet + ["clone", "--replace", source, target]],
            "remove": [ramet + ["rm", target]],
        }[how]
    remove, copy = ["rm", "-rf", target], ["cp", "-a", source, target]
    return {"clone": [copy], "replace": [remove, copy], "remove": [remove]}[how]


def run(user, commands):
    """Whether all of the commands succeed for a user."""
    uid, gid, groups = USERS[user]
    for one in commands:
        done = subprocess.run(
            one, user=uid, group=gid, extra_groups=groups, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
        )
        if done.returncode != 0:
            return False
    return True


def foreign(path, uid):
    """Files in a copy that do not belong to the user."""
    below = (os.path.join(root, name) for root, dirs, files in os.walk(path) for name in dirs + files)
    return sum(os.lstat(one).st_uid != uid for one in itertools.chain([path], below))


def main():
    base = sys.argv[1] + "/case"
    for (how, name), user, dir_name in itertools.product(
        itertools.product(["clone", "replace", "remove"], OBJECTS), USERS, DIRS
    ):
        os.mkdir(base)
        os.mkdir(base + "/from")
        os.mkdir(base + "/to")
        os.chmod(base, 0o755)
        os.chmod(base + "/from", 0o755)
        source, target = base + "/from/source", base + "/to/target"
        kinds = [how != "remove" and source, how != "clone" and target]
        for path in filter(None, kinds):
            OBJECTS[name](path)
        owner, group, mode = DIRS[dir_name]
        os.chown(base + "/to", owner, group)
        os.chmod(base + "/to", mode)
        done = run(user, command(how, source, target))
        uid = USERS[user][0]
        others = foreign(target, uid) if done and how != "remove" and uid != 0 else 0
        print(f"{how}; {name}; {user}; {dir_name}; {'done' if done else 'refused'}; {others}")
        shutil.rmtree(base)


main()
