# Programs that write and verify contents, in every way that the kernel has.

needs_fio="fio"
make_fio() { :; }
use_fio() {
    local engine direct rw unaligned least
    cd "$2" || return
    for engine in psync mmap libaio io_uring pvsync2 splice; do
        for direct in 0 1; do
            if [[ "$engine$direct" == mmap1 || "$engine$direct" == splice1 ]]; then continue; fi
            unaligned=$((1 - direct)) least=512
            # fio maps whole blocks only.
            if [[ "$engine" == mmap ]]; then unaligned=0 least=4096; fi
            for rw in randwrite randrw write; do
                fio --name="$engine" --filename="$2/f" --size=4M --bsrange=$least-64k --bs_unaligned=$unaligned \
                    --blockalign=$least --rw="$rw" --ioengine="$engine" --direct="$direct" --iodepth=8 --randseed=7 --fallocate=none \
                    --verify=crc32c --do_verify=1 --verify_fatal=1 --fsync=64 --output="$2/said" >/dev/null 2>&1
                echo "$engine $direct $rw $?"
                grep -E 'verify|err=[^ ]* *[1-9]' "$2/said" | head -n 3
            done
        done
    done
    fio --name=a --directory="$2" --nrfiles=50 --size=4M --bs=4k --rw=randwrite --numjobs=2 --verify=md5 --openfiles=10 \
        --fallocate=keep --output=/dev/null; echo "many $?"
    fio --name=t --filename="$2/t" --size=4M --bs=4k --rw=randtrim --ioengine=psync --output=/dev/null >/dev/null 2>&1
    echo "trim $?"
}

needs_stress_ng="stress-ng"
make_stress_ng() { mkdir "$1/t" && chmod 777 "$1/t"; }
# Stressors of files and memory that is mapped from files; what they say of their speed is left out.
use_stress_ng() {
    local stressor
    chmod 777 "$2"
    for stressor in access aiol chattr chmod chown copy-file dentry dir dirdeep fallocate fcntl file-ioctl filename flock fpunch \
        fstat getdent handle hdd inotify io-uring iomix link lease locka lockofd mknod open readahead rename revio \
        seek sendfile symlink sync-file touch utime xattr; do
        timeout -k 5 30 stress-ng --temp-path "$2" --"$stressor" 1 --"$stressor"-ops 20 --timeout 1 --verify --no-rand-seed --oomable \
            >"$2/.said" 2>&1
        echo "$stressor $?"
        grep -E 'fail:|unsuccessful' "$2/.said" | sed -E 's/\[[0-9]+\]//g; s/[0-9.]+ ?secs?//'
        rm -rf "$2"/tmp-stress-ng*
    done
}

needs_fsx="fsx"
make_fsx() { :; }
use_fsx() {
    local config
    cd "$2" || return
    for config in "" "mmap" "punch"; do
        {
            printf 'flen = 262144\n[opsize]\nmax = 65536\nmin = 1\nalign = 1\n[weights]\n'
            printf 'truncate = 10\nread = 10\nwrite = 10\nmapread = 10\nmapwrite = 10\nfsync = 1\nfdatasync = 1\nposix_fallocate = 3\npunch_hole = 10\nposix_fadvise = 2\ncopy_file_range = 5\nsendfile = 5\ninvalidate = 3\nclose_open = 2\n'
        } >"$2/fsx.toml"
        fsx -f "$2/fsx.toml" -N 3000 -S "$((${#config} + 3))" "$2/f" >"$2/said" 2>&1
        echo "fsx $config $?"
        { grep -iE 'error|mismatch|differ|unknown' "$2/said" || true; } | head -n 5
    done
}

# Whether everything but zeros lies in what SEEK_DATA tells, in order, up to the end.
holes_are_zeros() {
    python3 - "$1" <<'PY'
import os, sys
f = os.open(sys.argv[1], os.O_RDONLY)
end, at = os.fstat(f).st_size, 0
while at < min(end, 1 << 25):
    try: data = os.lseek(f, at, os.SEEK_DATA)
    except OSError: data = end
    if data > at and any(os.pread(f, data - at, at)): print("a hole has bytes", at, data)
    if data == end: break
    at = os.lseek(f, data, os.SEEK_HOLE)
    if at <= data: print("no progress", at)
PY
}

# Commands of xfs_io(8), with what the file is afterwards.
needs_xfs_io="xfs_io python3"
make_xfs_io() { head -c 1000000 /dev/zero | tr '\0' a >"$1/a" && head -c 100000 /dev/zero | tr '\0' b >"$1/b"; }
use_xfs_io() {
    local command
    while read -r command; do
        cp --sparse=never "$1/a" "$2/f" && cp "$1/b" "$2/g" && sync -f "$2/f"
        echo "== $command"
        # shellcheck disable=SC2086
        (cd "$2" && (eval "timeout 30 xfs_io $command f; true" 2>&1) 2>/dev/null) | sed -E 's/[0-9.]+ (sec|KiB|MiB|GiB|bytes)[^)]*\)?//g; s/\([^)]*(ops|iops)[^)]*\)//g'
        (cd "$2" && stat -c '%s' f && sha256sum f && holes_are_zeros f)
    done <<'COMMANDS'
-c "pwrite -S 0x63 5 10000" -c "pread 0 4096"
-c "falloc 0 2m"
-c "falloc -k 900000 2m"
-c "fpunch 4096 8192"
-c "fpunch 5000 100000"
-c "fzero 5000 100000"
-c "fzero -k 990000 100000"
-c "fzero 990000 100000"
-c "truncate 5000" -c "truncate 20000"
-c "truncate 9223372036854775807"
-c "copy_range -s 5 -d 777 -l 50000 g"
-c "copy_range -s 4096 -d 8192 -l 40960 g"
-c "copy_range -s 0 -d 995000 -l 100000 g"
-c "copy_range -s 99999 -d 0 -l 5000 g"
-c "copy_range -s 0 -d 500000 -l 100000 f"
-c "copy_range -s 0 -d 5000 -l 100000 f"
-c "reflink g"
-c "dedupe g 0 0 4096"
-c "mmap -rw 0 8192" -c "mwrite -S 0x64 10 100" -c "msync -s" -c "munmap"
-c "mmap -rw 0 1000000" -c "truncate 4096" -c "mread 0 10"
-d -c "pwrite -b 4096 -S 0x65 4096 65536"
-d -c "pwrite -b 512 -S 0x65 512 1024"
-a -c "pwrite -S 0x66 0 10"
-s -c "pwrite -S 0x66 0 10"
-c "pwrite -V 2 -b 5000 0 20000"
-c "pwrite -S 0x67 1500000 10" -c "seek -h 0" -c "seek -d 1010000"
-c "allocsp 0 0"
-c "fadvise -d 0 100000"
-c "readdir"
-c "lsattr" -c "chattr +A" -c "lsattr"
-c "chattr +i" -c "pwrite 0 1" -c "chattr -i"
-a -c "chattr +a" -c "pwrite 0 1" -c "chattr -a"
-c "extsize"
-c "lsproj"
-c "sync_range 0 4096"
-c "fsync" -c "fdatasync"
-c "utimes 1 2 3 4"
-c "sendfile -i g 0 50000"
-T -c "pwrite 0 100" -c "stat -v"
COMMANDS
}

needs_fallocate="python3"
make_fallocate() { head -c 400000 /dev/zero | tr '\0' z >"$1/f"; }
use_fallocate() {
    local option
    cd "$2" || return
    for option in "-l 1M" "-n -l 1M" "-p -o 100 -l 50000" \
        "-z -o 100 -l 500000" "-z -n -o 100 -l 500000" "-d" "-x -l 500000" "-p -o 300000 -l 500000"; do
        cp --sparse=never "$1/f" f && printf '%s: ' "$option"
        # shellcheck disable=SC2086
        fallocate $option f 2>&1
        echo "$? $(stat -c %s f) $(sha256sum <f)"
    done
    truncate -s 100 f && python3 - f <<'PY'
import os, sys
f = os.open(sys.argv[1], os.O_RDWR)
for whence in (os.SEEK_DATA, os.SEEK_HOLE):
    for at in (0, 50, 99, 100, 101, -1):
        try: print(whence, at, os.lseek(f, at, whence))
        except OSError as error: print(whence, at, error)
PY
}
