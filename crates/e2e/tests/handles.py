"""Handles of files and places in directories, which outlast a mount. Run by handles.rs.

handles.py PHASE ROOT STATE COUNT SEED: works in the directory ROOT, and keeps in the file STATE the
facts that the next phase looks at, in another mount. A fault ends it by an assertion.
"""
import ctypes, errno, os, pickle, random, struct, sys, time

from file_handles import handle, opened

libc = ctypes.CDLL(None, use_errno=True)
phase, root, state_path, count, seed = sys.argv[1:]
count, rng = int(count), random.Random(f"{seed} {phase}")


def forget_all():
    open("/proc/sys/vm/drop_caches", "w").write("2")


def create(path, text=""):
    with open(path, "w") as file:
        file.write(text)


def load():
    with open(state_path, "rb") as file:
        return pickle.load(file)


def store(state):
    with open(state_path, "wb") as file:
        pickle.dump(state, file)


def make_handles():
    dirs, files = [root], {}
    for number in range(count):
        if number % 40 == 0:
            dirs.append(f"{rng.choice(dirs[-20:])}/d{number}")
            os.mkdir(dirs[-1])
        files[number] = f"{rng.choice(dirs)}/f{number}"
        create(files[number], str(number))
    doomed = f"{root}/doomed"
    os.mkdir(doomed)
    gone = {}
    for number in range(count // 10):
        path = f"{doomed}/{number}"
        create(path, f"doomed {number}")
        gone[handle(path)] = os.stat(path).st_ino
    handles = {number: handle(path) for number, path in files.items()}
    # Some move to other directories, some have a second name, some go.
    for number in range(0, count // 4):
        new = f"{rng.choice(dirs)}/moved{number}"
        os.rename(files[number], new)
        files[number] = new
        if number % 2:
            os.link(new, f"{rng.choice(dirs)}/second{number}")
    for number in range(count - count // 20, count):
        os.unlink(files[number])
        gone[handles.pop(number)] = None
    store((handles, gone))


def find_all(top, handles, gone):
    for at, (number, stored) in enumerate(handles.items()):
        found = opened(top, stored)
        assert found == str(number), (number, found)
        if at % 1000 == 500:
            forget_all()
    for stored in gone:
        found = opened(top, stored)
        assert found == errno.ESTALE, found


def find_handles():
    handles, gone = load()
    top = os.open(root, os.O_RDONLY)
    living = {stored: number for stored, number in gone.items() if number is not None}
    for number, stored in enumerate(living):
        assert opened(top, stored) == f"doomed {number}"
    # The doomed ones go with their directory, and others get their numbers.
    for name in os.listdir(f"{root}/doomed"):
        os.unlink(f"{root}/doomed/{name}")
    os.rmdir(f"{root}/doomed")
    forget_all()
    os.sync()
    again = 0
    numbers = set(living.values())
    # Numbers of a dead directory are free when the background work has swept it.
    heir, end = 0, time.monotonic() + 60
    while again <= len(numbers) // 2 and time.monotonic() < end:
        heir += 1
        os.mkdir(f"{root}/heir{heir}")
        for number in range(count // 10):
            path = f"{root}/heir{heir}/{number}"
            create(path, "heir")
            again += os.stat(path).st_ino in numbers
        time.sleep(0.1)
    find_all(top, handles, gone)
    forget_all()
    find_all(top, handles, gone)
    print(f"{len(handles)} found, {len(gone)} gone, {again} numbers given again")
    assert again > len(numbers) // 2


def find_handles_again():
    handles, gone = load()
    find_all(os.open(root, os.O_RDONLY), handles, gone)


def make_streams():
    streams = []
    for number in range(count):
        at = f"{root}/s{number}"
        os.mkdir(at)
        names = 2500 if number < 2 else 200 if number < 20 else rng.randrange(12)
        for name in range(names):
            create(f"{at}/m{name}")
        streams.append({
            "cookie": 0, "done": False, "told": [], "room": max(120, names * 8),
            "stay": [f"m{name}" for name in range(names // 2)],
            "others": [f"m{name}" for name in range(names // 2, names)],
        })
    store(streams)


def read_piece(at, stream):
    """Reads one piece of a listing, from the place where the last one ended."""
    fd = os.open(at, os.O_RDONLY | os.O_DIRECTORY)
    os.lseek(fd, stream["cookie"], os.SEEK_SET)
    room = stream["room"] + rng.randrange(120)
    buffer = ctypes.create_string_buffer(room)
    length = libc.syscall(217, fd, buffer, room)
    assert length >= 0, os.strerror(ctypes.get_errno())
    os.close(fd)
    place = 0
    while place < length:
        _, cookie, size = struct.unpack_from("<QqH", buffer.raw, place)
        name = buffer.raw[place + 19:place + size].split(b"\0")[0].decode()
        stream["told"].append(name)
        stream["cookie"] = cookie
        place += size
    stream["done"] = length == 0


def change(at, stream, round_name):
    for _ in range(rng.randrange(4)):
        if not stream["others"]:
            break
        name = stream["others"].pop(rng.randrange(len(stream["others"])))
        if rng.random() < 0.5:
            os.unlink(f"{at}/{name}")
        else:
            new = f"{rng.choice('az')}{name}{round_name}"
            os.rename(f"{at}/{name}", f"{at}/{new}")
            stream["others"].append(new)
    for number in range(rng.randrange(3)):
        create(f"{at}/{rng.choice('az')}new{round_name}.{number}")


def read_streams():
    streams = load()
    round_name = f".{seed}"
    for number, stream in enumerate(streams):
        if stream["done"]:
            continue
        at = f"{root}/s{number}"
        read_piece(at, stream)
        change(at, stream, round_name)
        if number % 1000 == 500:
            forget_all()
    store(streams)
    left = sum(not stream["done"] for stream in streams)
    if left == 0:
        for number, stream in enumerate(streams):
            told = stream["told"]
            assert len(set(told)) == len(told), (number, told)
            assert set(stream["stay"]) <= set(told), (number, told)
    print(left)


{
    "make-handles": make_handles, "find-handles": find_handles,
    "find-handles-again": find_handles_again, "make-streams": make_streams,
    "read-streams": read_streams,
}[phase]()
