# What administrators and odd programs ask of a file system.

# A 32-bit program without large files: numbers and sizes that fit are told.
needs_small_numbers="gcc-32"
make_small_numbers() {
    cat >"$1/small.c" <<'C'
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <fcntl.h>
#include <unistd.h>
int main(int n, char **at) {
    for (int i = 1; i < n; i++) {
        struct stat s;
        printf("%s", at[i]);
        if (lstat(at[i], &s)) { printf(" %s\n", strerror(errno)); continue; }
        printf(" %d %ld", (int)sizeof s.st_ino, S_ISDIR(s.st_mode) ? 0 : (long)s.st_size);
        if (S_ISDIR(s.st_mode)) {
            DIR *d = opendir(at[i]);
            struct dirent *e;
            int count = 0;
            long middle = 0;
            while (errno = 0, e = readdir(d)) if (count++ == 500) middle = telldir(d);
            printf(" %d names %s", count, strerror(errno));
            seekdir(d, middle);
            for (count = 0; (e = readdir(d)); count++);
            printf(" %d", count);
            closedir(d);
        } else if (S_ISREG(s.st_mode)) {
            int f = open(at[i], O_RDONLY);
            printf(" %s %ld", f < 0 ? strerror(errno) : "open", f < 0 ? 0 : (long)lseek(f, 0, SEEK_END));
        }
        puts("");
    }
    struct statvfs v;
    printf("statvfs %s\n", statvfs(at[1], &v) ? strerror(errno) : "ok");
}
C
    gcc -m32 -o "$1/small" "$1/small.c" || return
    mkdir "$1/d" && (cd "$1/d" && seq 3000 | xargs touch)
    echo text >"$1/f" && truncate -s 3G "$1/large" && truncate -s 2147483647 "$1/fits" && ln -s f "$1/link"
}
use_small_numbers() { cd "$1" && ./small . d f large fits link d/7 missing "$2"; }

needs_find_inum="python3"
make_find_inum() { mkdir "$1/d" && (cd "$1/d" && seq 500 | xargs touch && ln 1 one); }
use_find_inum() {
    local name
    for name in 1 77 500; do find "$1" -inum "$(stat -c %i "$1/d/$name")" -printf '%P\n' | sort; done
    find "$1" -samefile "$1/d/one" -printf '%P\n' | sort
    find "$1/d" -printf '%i\n' | sort | uniq -d | wc -l
    # A listing and stat(2) tell one number.
    python3 -c 'import os, sys
print(sum(e.inode() != os.lstat(e.path).st_ino for e in os.scandir(sys.argv[1])), len({os.lstat(sys.argv[1] + "/" + n).st_ino for n in os.listdir(sys.argv[1])}))' "$1/d"
}

needs_handles="python3"
make_handles() { mkdir "$1/d" && (cd "$1/d" && seq 1000 | xargs touch && mkdir sub && echo deep >sub/file); }
use_handles() {
    python3 - "$1" <<'PY'
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint), ("type", ctypes.c_int), ("data", ctypes.c_ubyte * 128)]
def handle(path):
    h = Handle(bytes=128); mount = ctypes.c_int()
    if libc.name_to_handle_at(-100, path.encode(), ctypes.byref(h), ctypes.byref(mount), 0): return os.strerror(ctypes.get_errno())
    return h
def opened(root, h):
    f = libc.open_by_handle_at(root, ctypes.byref(h), os.O_RDONLY)
    if f < 0: return os.strerror(ctypes.get_errno())
    name = os.readlink(f"/proc/self/fd/{f}"); os.close(f); return name
at = sys.argv[1]
root = os.open(at, os.O_RDONLY)
names = sorted(os.listdir(at + "/d")); handles = {n: handle(f"{at}/d/{n}") for n in names}
open("/proc/sys/vm/drop_caches", "w").write("2")
print(sum(os.path.basename(opened(root, handles[n])) == n for n in names), len(names))
gone = handles["9"]; os.unlink(at + "/d/9"); print(opened(root, gone))
os.rename(at + "/d/8", at + "/moved"); print(opened(root, handles["8"]))
open(at + "/d/9", "w").close(); print(opened(root, gone))
h = handle(at + "/d/sub/file"); os.rename(at + "/d/sub", at + "/sub"); print(opened(root, h))
open("/proc/sys/vm/drop_caches", "w").write("2"); print(opened(root, h))
os.rename(at + "/sub", at + "/d/sub"); os.rename(at + "/moved", at + "/d/8")
PY
}

needs_chattr="chattr lsattr"
make_chattr() { mkdir "$1/d" && echo text >"$1/f" && echo text >"$1/d/g"; }
use_chattr() {
    local flag
    cd "$1" || return
    for flag in a i A d C F P E; do
        printf '%s: ' "$flag"
        chattr "+$flag" f 2>&1 | head -n 1
        lsattr f | cut -d ' ' -f 1 | tr -d e-
        { echo more >>f; } 2>/dev/null && echo appended
        { echo text >f; } 2>/dev/null && echo written
        rm -f f 2>/dev/null && echo removed && echo text >f
        chattr "-$flag" f 2>/dev/null
    done
    chattr -R +i d && rm -rf d 2>&1 && mv d e 2>&1
    touch d/new 2>&1
    chattr -R -i d && lsattr -d d | tr -d e-
}

needs_setfacl="setfacl getfacl"
root_setfacl=1
make_setfacl() { mkdir -p "$1/d/e" && touch "$1/d/f" "$1/d/e/g" && setfacl -d -m u:daemon:rw "$1/d"; }
use_setfacl() {
    cd "$1" || return
    getfacl_all() { find d | sort | xargs getfacl -n; }
    setfacl -R -m u:bin:rwX,d:u:bin:rX,d:o::- d
    umask 077
    mkdir d/made && touch d/made/x && mkfifo d/made/p
    cp -p d/f "$2/f" && (cd "$2" && getfacl -n f)
    getfacl_all >"$2/all" && cat "$2/all"
    chmod 640 d/f && getfacl -n d/f
    setfacl -R -b d && getfacl_all && setfacl --restore="$2/all" && getfacl_all | cmp - "$2/all"
    setfacl -m u:nosuch:r d 2>&1
    setpriv --reuid bin --regid bin --clear-groups cat d/f d/made/x 2>&1
    setpriv --reuid bin --regid bin --clear-groups touch d/e/h 2>&1
}

# What no FUSE file system has is refused, and changes nothing. ext4 has some of it, and only stands
# beside: lines tell of commands that were not refused.
needs_refusals="swapon fstrim e4defrag fallocate quotacheck xfs_io"
make_refusals() {
    head -c 409600 /dev/urandom >"$1/swap" && chmod 600 "$1/swap" && mkswap "$1/swap" >/dev/null 2>&1
    sha256sum <"$1/swap" >"$1/sum"
}
use_refusals() {
    local command
    [[ "$(stat -f -c %T "$1")" == fuse* ]] || return 0
    cd "$1" || return
    while read -r command; do
        # shellcheck disable=SC2086
        if timeout 20 $command >/dev/null 2>"$2/said"; then echo "not refused: $command"; fi
        [[ -s "$2/said" ]] || echo "no reason: $command"
        sha256sum <swap | cmp - sum || echo "changed: $command"
    done <<'COMMANDS'
swapon swap
fstrim .
e4defrag -v swap
quotacheck -m .
fallocate -c -o 4096 -l 4096 swap
fallocate -i -o 4096 -l 4096 swap
xfs_io -c fiemap swap
COMMANDS
    swapoff swap 2>/dev/null && echo "swapped"
    true
}

needs_mounts="setpriv"
root_mounts=1
make_mounts() { mkdir "$1/d" && echo text >"$1/d/f"; }
use_mounts() {
    mkdir "$2/bound" && mount --bind "$1/d" "$2/bound" && mount -o remount,bind,ro "$2/bound" || return
    cat "$2/bound/f"
    for change in "touch $2/bound/new" "rm $2/bound/f" "chmod 600 $2/bound/f" "truncate -s 0 $2/bound/f" "setfattr -n user.a -v b $2/bound/f" \
        "ln $2/bound/f $2/bound/g" "ln $2/bound/f $1/g" "mv $2/bound/f $1/g"; do
        $change 2>&1
    done
    mount -o remount,bind,rw "$2/bound" && touch "$2/bound/new"
    rmdir "$1/d" 2>&1
    umount "$2/bound"
    ls "$1/d"
    for option in nosuid noexec nosymfollow nodev; do
        mount --bind "$1" "$2/bound" && mount -o "remount,bind,$option" "$2/bound" || continue
        cp /bin/true "$1/true" && chmod 4755 "$1/true" && ln -sf true "$1/link" && mknod "$1/null" c 1 3
        "$2/bound/true" 2>&1; cat "$2/bound/link" >/dev/null 2>"$2/said" || cat "$2/said"; cat "$2/bound/null" 2>&1
        rm -f "$1/true" "$1/link" "$1/null"
        umount "$2/bound"
    done
    unshare -m --propagation private sh -c "mount -t tmpfs none '$1/d' && touch '$1/d/on-top' && ls '$1/d'"
    ls "$1/d"
}

needs_remount="mountpoint"
root_remount=1
make_remount() { echo text >"$1/f"; }
use_remount() {
    local top
    top="$(stat -c %m "$1")"
    exec 3<"$1/f"
    mount -i -o remount,ro "$top" || return
    touch "$1/new" 2>&1
    echo more 2>&1 >>"$1/f"
    cat "$1/f"
    mount -i -o remount,rw "$top" && touch "$1/new" && rm "$1/new"
    exec 4>>"$1/f"
    mount -i -o remount,ro "$top" 2>/dev/null && echo "remounted below a writer"
    exec 4>&-
    mount -i -o remount,rw "$top"
}

needs_capabilities="setpriv capsh"
root_capabilities=1
make_capabilities() { echo text >"$1/f" && chmod 600 "$1/f" && mkdir -m 700 "$1/d" && cp "$(command -v cat)" "$1/cat"; }
use_capabilities() {
    cd "$1" || return
    chmod 755 "$1" && chmod 4755 cat
    setpriv --reuid bin --regid bin --clear-groups ./cat f 2>&1
    setpriv --reuid bin --regid bin --clear-groups --no-new-privs ./cat f 2>&1
    setpriv --bounding-set=-dac_override,-dac_read_search --inh-caps=-all sh -c 'chown bin f; cat f; touch d/x' 2>&1
    setpriv --bounding-set=-fowner sh -c 'chmod 644 f' 2>&1
    setpriv --bounding-set=-chown sh -c 'chown daemon f' 2>&1
    setpriv --bounding-set=-fsetid sh -c 'echo x >>cat; stat -c %a cat' 2>&1
    setpriv --bounding-set=-mknod sh -c 'mknod n c 1 3' 2>&1
    setpriv --bounding-set=-linux_immutable sh -c 'chattr +i f' 2>&1
    setpriv --bounding-set=-sys_admin sh -c 'setfattr -n trusted.a -v b f' 2>&1
    setcap cap_net_raw+ep cat && getcap cat && echo x >>cat && getcap cat
    chown root f && chmod 600 f
}

needs_losetup="losetup mkfs.ext4"
make_losetup() { truncate -s 24M "$1/image" && mkfs.ext4 -q -E lazy_itable_init=0 -b 1024 "$1/image"; }
use_losetup() {
    local direct loop
    mkdir "$2/inside"
    for direct in off on; do
        loop="$(losetup --find --show --direct-io=$direct "$1/image" 2>"$2/said")" || { echo "direct $direct: $(cat "$2/said")"; continue; }
        mount "$loop" "$2/inside" || { losetup -d "$loop"; continue; }
        for i in $(seq 60); do head -c 50000 /dev/zero | tr '\0' "$((i % 10))" >"$2/inside/f$i"; done
        sync -f "$2/inside/f1" && rm "$2"/inside/f?5 && fstrim "$2/inside" >/dev/null && echo trimmed
        (cd "$2/inside" && sha256sum f*) && umount "$2/inside"
        losetup -d "$loop"
        e2fsck -fn "$1/image" >/dev/null 2>&1; echo "direct $direct: check $?"
    done
}

needs_locks="python3"
make_locks() { echo text >"$1/f"; }
use_locks() {
    cd "$1" || return
    flock -n f true && echo flock
    flock f sh -c 'flock -n f true || echo held'
    flock -s f flock -n -s f echo shared
    python3 - <<'PY'
import fcntl, os, signal, struct, time
a = open("f", "r+"); b = open("f", "r+")
fcntl.lockf(a, fcntl.LOCK_EX, 2, 1)
pid = os.fork()
if pid == 0:
    c = open("f", "r+")
    for start in (0, 1, 2, 3):
        try: fcntl.lockf(c, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, start); print(start, "got", flush=True)
        except OSError as error: print(start, error, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
a.close(); b.close()
try: fcntl.fcntl(os.open("f", os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK); print("lease")
except OSError as error: print("lease", error)
PY
}
