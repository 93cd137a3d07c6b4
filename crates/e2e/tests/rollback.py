"""A rollback of a mounted volume, as programs see it. Run by rollback.rs.

rollback.py ROOT RAMET SEED: works in the root of a mount. A fault ends it by an assertion.
"""
import ctypes, errno, fcntl, json, mmap, os, random, select, struct, subprocess, sys, threading, time

import file_handles
from file_handles import handle

root, ramet, seed = sys.argv[1:]
rng = random.Random(seed)
libc = ctypes.CDLL(None, use_errno=True)
os.chdir(root)


def opened(stored):
    """The text of the file that a handle leads to, or the errno."""
    top = os.open(root, os.O_RDONLY)
    text = file_handles.opened(top, stored)
    os.close(top)
    return text


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def read(path):
    with open(path) as file:
        return file.read()


def is_gone(call, *args):
    try:
        call(*args)
    except OSError as error:
        assert error.errno in (errno.ENOENT, errno.ESTALE), error
        return True
    return False


def tree(top):
    """Kinds, modes and contents by path."""
    found = {}
    for at, dirs, files in os.walk(top):
        for name in dirs + files:
            path = os.path.join(at, name)
            seen = os.lstat(path)
            text = read(path) if name in files else None
            found[os.path.relpath(path, top)] = (seen.st_mode, seen.st_nlink, text)
    return found


def snapshot(name):
    subprocess.run([ramet, "snapshot", "create", root, name], check=True)


def roll_back(name):
    command = [ramet, "snapshot", "rollback", "--json", root, name]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["before"]


class Watch:
    """Events of inotify for names in the root."""

    def __init__(self):
        self.fd = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(self.fd, root.encode(), 0x100 | 0x200 | 0x400 | 0x800) >= 0

    def names(self):
        found = []
        while select.select([self.fd], [], [], 0.3)[0]:
            events = os.read(self.fd, 1 << 16)
            while events:
                _, mask, _, length = struct.unpack_from("iIII", events)
                found.append((mask, events[16 : 16 + length].rstrip(b"\0").decode()))
                events = events[16 + length :]
        return found


def states():
    """Contents, names, modes and numbers are those of then right after the call."""
    os.makedirs("project/sub/deep")
    write("project/sub/kept", "then")
    write("project/sub/changed", "then")
    write("project/removed", "then")
    write("project/old name", "then")
    os.link("project/sub/kept", "linked")
    os.symlink("project/sub", "link")
    write("gone later", "then")
    os.chmod("project", 0o750)
    then = tree(root)
    snapshot("then")
    write("project/sub/changed", "now, and longer")
    os.remove("project/removed")
    os.rename("project/old name", "project/new name")
    os.remove("gone later")
    os.makedirs("project/made/in")
    write("project/made/in/file", "now")
    write("top", "now")
    os.chmod("project", 0o700)
    for absent in ["gone later", "project/removed", "nothing"]:
        assert is_gone(os.stat, absent)
    assert sorted(os.listdir("project")) == ["made", "new name", "sub"]
    now = tree(root)
    return then, now


def known(then, now):
    """Descriptors, mappings, locks, working directories, handles and watches."""
    watch = Watch()
    changed = open("project/sub/changed", "r+")
    made = open("project/made/in/file", "r+")
    directory = os.open("project/sub", os.O_RDONLY)
    mapped_fd = os.open("mapped", os.O_RDWR | os.O_CREAT)
    os.ftruncate(mapped_fd, 8192)
    mapped = mmap.mmap(mapped_fd, 8192)
    mapped[0:6] = b"before"
    handles = {name: handle(name) for name in ["top", "project/made/in/file", "project/sub/kept"]}
    fcntl.flock(changed, fcntl.LOCK_EX)
    before = roll_back("then")
    assert tree(root) == then, (tree(root), then)
    assert is_gone(os.stat, "top") and is_gone(os.stat, "project/made")
    assert read("gone later") == "then" and read("link/changed") == "then"
    assert os.stat("linked").st_nlink == 2
    # A descriptor goes on with its file, which has no name.
    assert changed.read() == "now, and longer" and made.read() == "now"
    changed.write(" still")
    changed.flush()
    os.fsync(changed.fileno())
    assert os.pread(changed.fileno(), 100, 0) == b"now, and longer still"
    assert os.fstat(changed.fileno()).st_nlink == 0
    assert os.fstat(changed.fileno()).st_ino != os.stat("project/sub/changed").st_ino
    mapped[4096:4101] = b"later"
    mapped.flush()
    assert os.pread(mapped_fd, 6, 0) == b"before"
    # A directory of before has no names.
    assert os.listdir(directory) == []
    assert is_gone(os.open, "kept", os.O_RDONLY, 0o600)
    for name in ["top", "project/made/in/file"]:
        found = opened(handles[name])
        # The kernel knows a file that is open, whose handle leads there.
        assert found == errno.ESTALE or name.endswith("file") and found == "now", (name, found)
    made.close()
    deadline = time.monotonic() + 20
    while opened(handles["project/made/in/file"]) != errno.ESTALE:
        assert time.monotonic() < deadline, "a handle of a file that is gone"
        time.sleep(0.05)
    for name in ["project/sub/kept", "linked", "gone later"]:
        assert opened(handle(name)) == "then"
    # The watch of the root stands.
    watch.names()
    write("watched", "x")
    os.remove("watched")
    assert [name for _, name in watch.names()] == ["watched", "watched"]
    shown = f"{root}/.ramet/snapshots/{before}"
    if os.path.isdir(shown):
        assert open(f"{shown}/mapped", "rb").read()[:6] == b"before"
        seen = tree(shown)
        seen.pop("mapped")
        # A view shows no rights to write.
        contents = lambda found: {path: text for path, (_, _, text) in found.items()}
        assert contents(seen) == contents(now), (seen, now)
    # A process in a directory of before finds nothing, and the way from the root is open.
    os.fchdir(directory)
    assert is_gone(os.open, "kept", os.O_RDONLY)
    assert is_gone(os.mkdir, "new")
    os.chdir(root)
    write("project/sub/kept", "on")
    assert read("linked") == "on"
    again = roll_back(before)
    assert open("mapped", "rb").read()[:6] == b"before"
    os.remove("mapped")
    assert tree(root) == now
    assert roll_back(again) and read("linked") == "on"
    for name in ["top", "project/made/in/file"]:
        assert opened(handles[name]) == errno.ESTALE
    roll_back("then")
    assert tree(root) == then
    for one in [changed, mapped]:
        one.close()
    for one in [directory, mapped_fd]:
        os.close(one)


def busy():
    """Rollbacks beside clients lose no name that all states have, and end with a state of then."""
    stop, errors, waits = threading.Event(), [], []

    def client(number):
        own, worst = f"client{number}", 0.0
        try:
            while not stop.is_set():
                begun = time.monotonic()
                assert read("link/changed") == "then"
                names = os.listdir(root)
                assert "project" in names and "linked" in names, names
                worst = max(worst, time.monotonic() - begun)
                try:
                    os.makedirs(f"{own}/a/b", exist_ok=True)
                    write(f"{own}/a/b/file", "x" * rng.randrange(20000))
                    os.rename(f"{own}/a/b/file", f"{own}/a/file")
                    read(f"{own}/a/file")
                    os.remove(f"{own}/a/file")
                except OSError as error:
                    # A rollback took the directory away.
                    assert error.errno in (errno.ENOENT, errno.ESTALE, errno.EEXIST), error
        except BaseException as error:
            errors.append((number, repr(error)))
            stop.set()
        waits.append(worst)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 8
    count = 0
    while time.monotonic() < end and not stop.is_set():
        before = roll_back("then")
        count += 1
        if rng.random() < 0.7:
            subprocess.run([ramet, "snapshot", "rm", root, before], check=True)
        time.sleep(rng.random() / 5)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors, errors
    print(f"{count} rollbacks beside 16 clients, the longest wait {max(waits):.3f} s")


then, now = states()
known(then, now)
busy()
roll_back("then")
assert tree(root) == then
