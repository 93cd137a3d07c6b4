"""Makes control calls as a process that sees a part of a mount only, and prints their outcomes.

Usage: confined.py ROOT PART FORK, as root. ROOT is the mount of the whole volume, PART a bind mount
of a part of it, and FORK the path of a fork outside of that part. The process looks at ROOT first,
as a caller that guesses numbers well, and then confines itself to PART by chroot(2). The output is a
JSON object: "done" or the name of an error, by the call.
"""

import errno
import fcntl
import json
import os
import struct
import sys

JSON_BYTES = 16 * 1024 - 4


def number(direction, nr, size):
    return direction << 30 | size << 16 | ord("R") << 8 | nr


GROW = number(1, 10, 8)
SOURCE = number(3, 6, 264)
SCRUB = number(3, 9, JSON_BYTES)
SNAPSHOT = number(3, 14, JSON_BYTES)
STAGE = number(3, 15, JSON_BYTES)
FORK = number(3, 16, JSON_BYTES)
SEND = number(3, 17, JSON_BYTES)


def call(fd, nr, data):
    fcntl.ioctl(fd, nr, data, True)
    return data


def ask(fd, nr, request):
    text = json.dumps(request).encode()
    data = bytearray(JSON_BYTES)
    data[:4] = struct.pack("<I", len(text))
    data[4 : 4 + len(text)] = text
    data = call(fd, nr, data)
    length = struct.unpack_from("<I", data)[0]
    return bytes(data[4 : 4 + length])


def token(fd, name=b"."):
    data = bytearray(264)
    struct.pack_into("<II", data, 0, 0, len(name))
    data[8 : 8 + len(name)] = name
    return struct.unpack_from("<Q", call(fd, SOURCE, data))[0]


def known_fork(root, path):
    fd = os.open(root, os.O_RDONLY)
    forks = json.loads(ask(fd, FORK, {"list": {"after": None}}))["forks"]
    os.close(fd)
    return next(fork for fork in forks if fork["path"] == path)


def attempts(fd, fork):
    """Each with its call. A form without a token is that of daemons which took any path."""
    name, path, snapshot = list(b"copy"), list(b"out/secret"), "then"
    numbers = {"id": fork["id"], "top": [fork["ino"], fork["generation"]]}
    restore = {"snapshot": snapshot, "path": path, "name": name, "replace": False}
    place = [snapshot, "out"]
    sent = {"session": 7, "begins": True, "name": "out", "at": place, "base": None}
    based = dict(sent, at=None, base=place)
    yield "base by numbers", lambda: ask(
        fd, FORK, {"copy_base": {"fork": numbers, "name": name}}
    )
    yield "base by a guessed token", lambda: ask(
        fd, FORK, {"copy_base": {"fork": fork["ino"], "id": fork["id"], "name": name}}
    )
    yield "base by a token of the part", lambda: ask(
        fd, FORK, {"copy_base": {"fork": token(fd), "id": fork["id"], "name": name}}
    )
    for number, verb in [(SNAPSHOT, "restore"), (STAGE, "stage")]:
        yield verb + " by path", lambda: ask(fd, number, {"restore": restore})
        yield verb + " by a guessed token", lambda: ask(
            fd, number, {"restore": dict(restore, root=1)}
        )
        yield verb + " by a token of the part", lambda: ask(
            fd, number, {"restore": dict(restore, root=token(fd))}
        )
    for told, request in [("tree", sent), ("base", based)]:
        yield "send a " + told + " by path", lambda: ask(fd, SEND, {"add": request})
        yield "send a " + told + " by a token of the part", lambda: ask(
            fd, SEND, {"add": dict(request, root=token(fd))}
        )
    for verb, request in [
        ("log", {"path": path, "from": 0}),
        ("diff", {"session": 8, "snapshot": snapshot, "path": path}),
        ("create", {"name": "mine"}),
        ("remove", {"name": snapshot}),
        ("policy", {"set": "daily=1"}),
    ]:
        yield "snapshot " + verb, lambda: ask(fd, SNAPSHOT, {verb: request})
    yield "scrub", lambda: call(
        fd, SCRUB, bytearray(struct.pack("<QQ", 1, 9).ljust(JSON_BYTES, b"\0"))
    )
    yield "grow", lambda: call(fd, GROW, bytearray(struct.pack("<Q", 512 << 20)))
    yield "remove ..", lambda: ask(fd, STAGE, {"remove": {"name": list(b"..")}})


def allowed(fd, own):
    yield "list", lambda: ask(fd, SNAPSHOT, {"list": {"from": 0, "exclusive": False}})
    yield "stage", lambda: ask(
        fd, STAGE, {"clone": {"source": token(fd, b"own"), "name": list(b"x"), "replace": False}}
    )
    yield "base", lambda: ask(
        fd,
        FORK,
        {"copy_base": {"fork": token(fd, b"own"), "id": own["id"], "name": list(b"base")}},
    )


def outcome(attempt):
    try:
        attempt()
        return "done"
    except OSError as error:
        return errno.errorcode[error.errno]


root, part, path = sys.argv[1:]
fork, own = known_fork(root, path), known_fork(root, "part/own")
os.chroot(part)
os.chdir("/")
here = os.open("/", os.O_RDONLY)
told = {
    "refused": {name: outcome(attempt) for name, attempt in attempts(here, fork)},
    "allowed": {name: outcome(attempt) for name, attempt in allowed(here, own)},
}
print(json.dumps(told))
