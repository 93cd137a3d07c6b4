# Sourced by the scripts at the root: installs what they need and names the build folder.

# prepare_tools PROGRAM:PACKAGE... installs the Debian packages of the programs that are missing.
prepare_tools() {
    local pair missing=()
    for pair in "$@"; do
        PATH="$PATH:/usr/sbin:/sbin" command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
    done
    prepare_packages "${missing[@]}"
    if [[ ! -e /dev/fuse ]]; then
        as_root modprobe fuse 2>/dev/null || true
        [[ -e /dev/fuse ]] || { echo "/dev/fuse is missing: mounts cannot be tested here" >&2; exit 1; }
    fi
    # What udev does when the package fuse3 is installed; containers have no udev.
    if ((EUID == 0)) && [[ "$(stat -c %a /dev/fuse)" != 666 ]]; then chmod 666 /dev/fuse; fi
}

# prepare_packages PACKAGE... installs Debian packages; returns false when that is not possible.
prepare_packages() {
    (($#)) || return 0
    echo "installing: $*"
    command -v apt-get >/dev/null || { echo "please install: $*" >&2; return 1; }
    as_root apt-get update -qq || true
    as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

as_root() {
    if ((EUID == 0)); then "$@"; else sudo -n "$@"; fi
}

prepare_rust() {
    command -v cargo >/dev/null || { echo "please install Rust: https://rustup.rs" >&2; exit 1; }
    if command -v rustup >/dev/null; then
        cargo fmt --version >/dev/null 2>&1 || rustup component add rustfmt
        cargo clippy --version >/dev/null 2>&1 || rustup component add clippy
    fi
}

# prepare_room GIB FOLDER says so when a folder has less room than what follows may take.
prepare_room() {
    mkdir -p "$2"
    local free
    free="$(df --output=avail -BG "$2" | tail -n 1 | tr -dc 0-9)"
    ((free >= $1)) || { echo "$2 has $free GiB of free room, $1 are needed" >&2; exit 1; }
}

target_dir() {
    cargo metadata --format-version 1 --no-deps | sed -n 's/.*"target_directory":"\([^"]*\)".*/\1/p'
}
