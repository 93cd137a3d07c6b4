# Overlays with their upper directory in the tree, and their work directory beside it.

make_lower() {
    cd "$1" || return
    mkdir -p lower/d/e lower/gone upper
    for i in 1 2 3; do echo "$i" >"lower/d/f$i" && echo "$i" >"lower/gone/g$i"; done
    ln lower/d/f1 lower/d/hard
    setfattr -n user.a -v b lower/d/f2
}

# Changes in an overlay that is mounted at a directory, and that directory afterwards.
change_merged() {
    cd "$1" || return
    echo new >new && mkdir made && echo x >made/x
    echo more >>d/f1
    rm d/f2 && rm -r gone && mkdir gone && echo again >gone/again
    mv d/f3 d/e/moved && mv made renamed
    ln new new2 && stat -c '%h' new
    touch rm-me && rm rm-me && mkdir short && rmdir short
    chmod 4755 new && chown daemon new && setfattr -n user.c -v d d/f1
    rm d/e/moved && mv d d2 2>&1
    python3 -c 'import os; os.rename("new2", "new3"); f = os.open(".", os.O_TMPFILE | os.O_RDWR); os.write(f, b"t"); os.link(f"/proc/self/fd/{f}", "tmp", src_dir_fd=f)' 2>&1
    find . -printf '%y %m %U %p\n' | sort
    find . -type f -print0 | sort -z | xargs -0 cat
}

# Whiteouts, opaque directories and origins in an upper directory.
upper_facts() {
    (cd "$1" && find . -printf '%y %m %p\n' | sort)
    (cd "$1" && find . -print0 | sort -z | xargs -0 getfattr -h -m '^(trusted|user)\.(overlay|c)' | grep -v -e 'origin$')
}

needs_overlayfs="overlay setfattr"
root_overlayfs=1
make_overlayfs() { make_lower "$1"; }
use_overlayfs() {
    mkdir "$2/work" "$2/merged" || return
    for options in "" ",index=on" ",metacopy=on,redirect_dir=on" ",userxattr" ",volatile"; do
        rm -rf "$1/upper" "$2/work" && mkdir "$1/upper" "$2/work"
        echo "options $options"
        mount -t overlay overlay -o "lowerdir=$1/lower,upperdir=$1/upper,workdir=$2/work$options" "$2/merged" || continue
        (change_merged "$2/merged")
        umount "$2/merged"
        upper_facts "$1/upper"
    done
    # The upper directory as it was, mounted again.
    rm -rf "$2/work/work/incompat" && mount -t overlay overlay -o "lowerdir=$1/lower,upperdir=$1/upper,workdir=$2/work" "$2/merged" || return
    (cd "$2/merged" && find . | sort)
    umount "$2/merged"
    # A read-only overlay of two lower directories.
    mount -t overlay overlay -o "lowerdir=$1/upper:$1/lower" "$2/merged" && (cd "$2/merged" && find . | sort) && umount "$2/merged"
}

# Fusermount3, which is root's, may not enter the mount of another user.
needs_fuse_overlayfs="fuse-overlayfs setfattr"
root_fuse_overlayfs=1
make_fuse_overlayfs() { make_lower "$1"; }
use_fuse_overlayfs() {
    mkdir "$2/work" "$2/merged" || return
    fuse-overlayfs -o "lowerdir=$1/lower,upperdir=$1/upper,workdir=$2/work" "$2/merged" || return
    (change_merged "$2/merged")
    umount "$2/merged"
    upper_facts "$1/upper"
    fuse-overlayfs -o "lowerdir=$1/lower,upperdir=$1/upper,workdir=$2/work" "$2/merged" || return
    (cd "$2/merged" && find . | sort)
    umount "$2/merged"
}

# Layers of an image in the overlay store, which is made in the tree and used again in its copy.
buildah_in() { buildah --log-level error --root "$1/store" --runroot "$2/run" --storage-driver overlay "${@:3}"; }
needs_buildah="buildah overlay"
make_buildah() { mkdir "$1/store" && echo text >"$1/file"; }
use_buildah() {
    local made at
    made="$(buildah_in "$1" "$2" from --name made scratch)" || { echo "$made"; return 1; }
    buildah_in "$1" "$2" copy -q made "$1/file" /dir/file >/dev/null
    buildah_in "$1" "$2" commit -q made first >/dev/null || return
    buildah_in "$1" "$2" from --name again localhost/first >/dev/null || return
    at="$(buildah_in "$1" "$2" mount again)" || { echo "$at"; return 1; }
    (cd "$at" && cat dir/file && rm dir/file && echo more >dir/more && mv dir other && ls -R)
    buildah_in "$1" "$2" umount again >/dev/null
    buildah_in "$1" "$2" commit -q again second >/dev/null || return
    buildah_in "$1" "$2" images --format '{{.Name}}' | sort
    at="$(buildah_in "$1" "$2" from --name third localhost/second >/dev/null; buildah_in "$1" "$2" mount third)"
    (cd "$at" && find . | sort)
    buildah_in "$1" "$2" info | grep -i -E 'GraphDriverName|Native Overlay|d_type|Supports' || true
    buildah_in "$1" "$2" rm --all >/dev/null
    buildah_in "$1" "$2" rmi --all --force >/dev/null
    buildah_in "$1" "$2" images -q
    umount "$1/store/overlay" 2>/dev/null
    true
}

# An image from a file system in the tree, a container that runs in it, and a second image of what
# the container left. Both come from the overlay store in the tree.
# The path of its state is short, as podman demands.
podman_in() { podman --log-level error --root "$1/store" --runroot "$podman_state" --storage-driver overlay "${@:3}"; }
needs_podman="podman crun gcc unshare overlay"
root_podman=1
make_podman() {
    mkdir "$1/store" "$1/root" "$1/root/dir" && echo text >"$1/root/dir/file" || return
    cat >"$1/prog.c" <<'PROGRAM'
#include <stdio.h>
#include <sys/stat.h>
int main(int count, char **words) {
    FILE *file = fopen("/dir/ran", "w");
    if (!file || fprintf(file, "%d words\n", count) < 0 || fclose(file)) return 1;
    if (remove("/dir/file") || mkdir("/dir/new", 0755) || rename("/old", "/dir/new/old")) return 2;
    return puts("in the container") < 0;
}
PROGRAM
    echo old >"$1/root/old"
    gcc -static -o "$1/root/prog" "$1/prog.c" && tar -C "$1/root" -cf "$1/root.tar" .
}
# crun takes one kind of control groups; here it sees the second alone, and makes none.
in_container() {
    if [[ -d /sys/fs/cgroup/unified ]]; then
        umount -R /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup || return
    fi
    podman_in "$1" "$2" run --name made --network none --cgroups disabled --ulimit nofile=1024:1024 \
        --ulimit nproc=1024:1024 localhost/first:latest /prog a b
}
use_podman() {
    local podman_state status=0
    podman_state="$(mktemp -d /run/podman.XXXXXX)"
    export podman_state
    podman_facts "$1" "$2" || status=$?
    umount "$1/store/overlay" 2>/dev/null
    rm -rf --one-file-system "$podman_state"
    return "$status"
}
podman_facts() {
    local at
    podman_in "$1" "$2" import -q "$1/root.tar" first >/dev/null || return
    export -f podman_in in_container
    unshare -m bash -c 'in_container "$@"' - "$1" "$2"
    echo "status $?"
    podman_in "$1" "$2" diff made | sort
    podman_in "$1" "$2" commit -q made second >/dev/null || return
    podman_in "$1" "$2" create -q --name again localhost/second:latest /prog >/dev/null || return
    at="$(podman_in "$1" "$2" mount again)" || { echo "$at"; return 1; }
    (cd "$at" && find . | sort && cat dir/ran dir/new/old && mv dir/new moved && rm dir/ran && ls -R)
    podman_in "$1" "$2" umount again >/dev/null
    podman_in "$1" "$2" diff again | sort
    podman_in "$1" "$2" images --format '{{.Repository}}' | sort
    podman_in "$1" "$2" info --format '{{.Store.GraphDriverName}} {{index .Store.GraphStatus "Native Overlay Diff"}}'
    podman_in "$1" "$2" rm -af >/dev/null
    podman_in "$1" "$2" rmi -af >/dev/null
    podman_in "$1" "$2" images -q
}
