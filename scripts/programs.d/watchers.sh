# Programs that watch files. They hear of changes by programs, and of trees that Ramet's commands
# make, replace and remove at once.

# Waits until what was changed has been told; programs print what they hear sorted.
settle() { sleep 1; }

# Changes of a tree that watchers hear of.
change_watched() {
    cd "$1" || return
    echo one >d/new && settle && echo two >>d/new && settle
    mv d/new d/renamed && settle && rm d/renamed && settle
    mkdir d/made && settle && echo x >d/made/x && settle && rm -r d/made && settle
    chmod 600 d/f && settle && touch d/f && settle
    mkdir e/copy && settle && cp d/f e/copy/f && settle && rm -r e/copy && settle
    mv d/f e/f && settle
}

make_watched() { mkdir "$1/d" "$1/e" && echo x >"$1/d/f"; }

on_ramet() { [[ "$(stat -f -c %t .)" == 65735546 ]]; }

# copy_at_once SOURCE TARGET
copy_at_once() { if on_ramet; then "$RAMET_BIN" clone "$1" "$2"; else cp -a "$1" "$2"; fi; }

# replace_at_once SOURCE TARGET BESIDE: on ext4 a copy in the directory BESIDE, which is not watched,
# exchanges its name with a tree or moves over a file.
replace_at_once() {
    if on_ramet; then
        "$RAMET_BIN" clone --replace "$1" "$2"
        return
    fi
    cp -a "$1" "$3/staged" || return
    if [[ ! -d "$2" ]]; then
        mv "$3/staged" "$2"
        return
    fi
    python3 - "$2" "$3/staged" <<'PY' && rm -rf "$3/staged"
import ctypes, os, sys
at_fdcwd, exchange = -100, 2
libc = ctypes.CDLL(None, use_errno=True)
if libc.renameat2(at_fdcwd, os.fsencode(sys.argv[1]), at_fdcwd, os.fsencode(sys.argv[2]), exchange):
    sys.exit(os.strerror(ctypes.get_errno()))
PY
}

# remove_at_once PATH
remove_at_once() { if on_ramet; then "$RAMET_BIN" rm "$1"; else rm -rf "$1"; fi; }

# Trees that are copied, and directories to watch.
make_trees() {
    mkdir -p "$1/one/sub/deep" "$1/two/sub/deep" "$1/two/other" "$1/d" "$1/e"
    echo one >"$1/one/sub/deep/f" && echo one >"$1/one/top" && echo one >"$1/one/sub/first"
    echo two >"$1/two/sub/deep/f" && echo two >"$1/two/top" && echo two >"$1/two/other/second"
}

# change_trees TREE OUT HEARS: trees and files come, are replaced and go in the directory d. After
# each change HEARS gets its name.
change_trees() {
    local change words
    cd "$1" || return
    for change in "copy one d/t" "write d/t/sub/deep/f" "replace two d/t" "write d/t/other/second" \
        "copy two d/u" "remove d/t" "write d/u/sub/deep/new" "copy one d/t" "write d/t/sub/first" \
        "replace one d/u" "write d/u/sub/deep/f" "remove d/u" "copy one/top d/file" \
        "replace two/top d/file" "write d/file" "remove d/file" "copy two/top d/file"; do
        read -r -a words <<<"$change"
        case ${words[0]} in
        copy) copy_at_once "${words[1]}" "${words[2]}" ;;
        replace) replace_at_once "${words[1]}" "${words[2]}" "$2" ;;
        remove) remove_at_once "${words[1]}" ;;
        write) echo more >>"${words[1]}" ;;
        esac || echo "$change fails"
        settle
        "$3" "$change"
    done
}

# A line with the change, between the lines of a program that writes to the file `heard`.
mark_heard() { echo "= $1" >>"$heard"; }

needs_inotifywait="inotifywait"
make_inotifywait() { make_watched "$1"; }
use_inotifywait() {
    local watcher
    cd "$1" || return
    timeout 60 inotifywait -q -m -r --format '%w%f %e' "$1/d" "$1/e" >"$2.heard" &
    watcher=$!
    settle
    (change_watched "$1")
    kill "$watcher" && wait "$watcher" 2>/dev/null
    # Events that come again before they are read are told once.
    uniq "$2.heard"
    rm "$2.heard"
}

needs_inotifywait_trees="inotifywait python3"
make_inotifywait_trees() { make_trees "$1"; }
use_inotifywait_trees() {
    local watcher heard="$2/heard"
    cd "$1" || return
    : >"$heard"
    timeout 90 inotifywait -q -m -r --format '%w|%e|%f' d >>"$heard" 2>/dev/null &
    watcher=$!
    settle
    change_trees "$1" "$2" mark_heard
    kill "$watcher" && wait "$watcher" 2>/dev/null
    # The last word about each name in d, ends of directories below, and writes. Whether a tree that
    # moved away tells its own end hangs on time: inotifywait stops to watch it.
    python3 - "$heard" <<'PY'
import sys
told, ended, written = {}, set(), set()
for line in open(sys.argv[1]):
    if line.startswith("= "):
        print(line.strip(), told, sorted(ended), sorted(written) if "write" in line else "")
        told, ended, written = {}, set(), set()
        continue
    where, events, name = line.rstrip("\n").split("|")
    events = set(events.split(","))
    if where == "d/" and events & {"CREATE", "MOVED_TO"}: told[name] = "there"
    if where == "d/" and events & {"DELETE", "MOVED_FROM"}: told[name] = "gone"
    if "DELETE_SELF" in events and where.count("/") > 2: ended.add(where)
    if events & {"CREATE", "MODIFY"}: written.add(where + name)
PY
}

# start_chokidar OUT PATH...: in the background, until it is ready. It writes to OUT/heard.
start_chokidar() {
    local out="$1"
    cat >"$out/watch.js" <<'JS'
const chokidar = require(process.argv[2]);
const watcher = chokidar.watch(process.argv.slice(3), { ignoreInitial: true });
watcher.on('all', (event, path) => console.log(event, path)).on('ready', () => console.log('ready'));
setTimeout(() => process.exit(1), 90000);
JS
    : >"$out/heard"
    timeout 90 node "$out/watch.js" "$tools/node_modules/chokidar" "${@:2}" >>"$out/heard" &
    for _ in $(seq 200); do grep -q ready "$out/heard" && break; sleep 0.1; done
}

needs_chokidar="node chokidar"
make_chokidar() { make_watched "$1"; }
use_chokidar() {
    local watcher
    cd "$1" || return
    start_chokidar "$2" "$1/d" "$1/e"
    watcher=$!
    (change_watched "$1")
    settle
    kill "$watcher" && wait "$watcher" 2>/dev/null
    # One change or two are told of a file that is made and written, as time falls.
    sort -u "$2/heard" | grep -v -E '^change .*(new|copy/f|made/x)$'
}

needs_chokidar_trees="node chokidar python3"
make_chokidar_trees() { make_trees "$1"; }
use_chokidar_trees() {
    local watcher heard="$2/heard"
    cd "$1" || return
    start_chokidar "$2" "$1/d"
    watcher=$!
    change_trees "$1" "$2" mark_heard
    kill "$watcher" && wait "$watcher" 2>/dev/null
    # The last word about each name. Files that come with a tree may be told as changed too: that
    # hangs on their times.
    python3 - "$heard" <<'PY'
import sys
events = {"add": "there", "addDir": "there", "unlink": "gone", "unlinkDir": "gone"}
told, changed = {}, False
for line in open(sys.argv[1]):
    event, _, name = line.strip().partition(" ")
    if event == "=":
        print(line.strip())
        for path in sorted(told): print(path, told[path])
        if name.startswith("write"): print(changed)
        told, changed = {}, False
    elif event in events:
        told[name] = events[event]
    changed |= event in ["add", "change"]
PY
}

# A server of its own for the case, and a command that asks it and starts no other one.
private_watchman() {
    local own
    mkdir -p "$1/state" "$1/bin"
    own="$(command -v watchman) --sockname $1/socket --statefile $1/state/state --pidfile $1/state/pid --logfile $1/state/log"
    $own get-pid >"$1/state/said" || return
    watchman_pid="$(tr -dc 0-9, <"$1/state/said" | cut -d , -f 2)"
    printf '#!/bin/sh\nexec %s --no-spawn "$@"\n' "$own" >"$1/bin/watchman"
    chmod +x "$1/bin/watchman"
    export PATH="$1/bin:$PATH"
}
# The server ends by a signal: after shutdown-server, version 4.9 stays.
watchman_ends() { kill "$watchman_pid"; settle; }

needs_watchman="watchman python3"
make_watchman() { make_watched "$1"; }
use_watchman() {
    cd "$1" || return
    private_watchman "$2" || return
    watchman watch "$1/d" | grep -E '"(watcher|error)"'
    local clock
    clock="$(watchman clock "$1/d" | python3 -c 'import json, sys; print(json.load(sys.stdin)["clock"])')"
    echo new >d/new && settle
    mkdir -p d/deep/er && echo x >d/deep/er/x && rm d/f && mv d/new d/other
    settle
    watchman -j <<JSON | python3 -c 'import json, sys; [print(f["name"], f["exists"], f["type"]) for f in sorted(json.load(sys.stdin)["files"], key=lambda f: f["name"])]'
["query", "$1/d", {"since": "$clock", "fields": ["name", "exists", "type"]}]
JSON
    watchman find "$1/d" '*' | grep '"name"' | sort
    watchman_ends
}

needs_watchman_trees="watchman python3"
make_watchman_trees() { make_trees "$1"; }
use_watchman_trees() {
    local clock_file="$2/clock"
    cd "$1" || return
    private_watchman "$2" || return
    watchman watch "$1/d" | grep -E '"error"'
    watchman clock "$1/d" >"$clock_file"
    change_trees "$1" "$2" ask_watchman
    watchman find "$1/d" '*' | grep '"name"' | sort
    watchman_ends
}

# The names that changed since the last question.
ask_watchman() {
    echo "= $1"
    python3 - "$PWD/d" "$clock_file" <<'PY'
import json, subprocess, sys
top, file = sys.argv[1:]
since = json.load(open(file))["clock"]
query = ["query", top, {"since": since, "fields": ["name", "exists", "type"]}]
said = subprocess.run(["watchman", "-j"], input=json.dumps(query), capture_output=True, text=True)
said = json.loads(said.stdout)
json.dump({"clock": said["clock"]}, open(file, "w"))
if said["is_fresh_instance"]: print("it begins anew")
for found in sorted(said["files"], key=lambda found: found["name"]):
    print(found["name"], found["exists"], found["type"])
PY
}

# tail(1) polls files of every FUSE file system once a second, which it takes for remote ones, so
# its messages may be others; the lines are the same.
needs_tail="timeout"
make_tail() { echo one >"$1/log"; }
use_tail() {
    local watcher line
    cd "$1" || return
    : >"$2/heard"
    timeout 90 tail -F log >"$2/heard" 2>/dev/null &
    watcher=$!
    said() { for _ in $(seq 150); do grep -q "$1" "$2" && return; sleep 0.1; done; }
    said one "$2/heard"
    for line in two three four five; do
        case $line in
        two) echo two >>log ;;
        three) mv log log.1 && echo three >log ;;
        four) echo four >new && mv new log ;;
        five) rm log && sleep 3 && echo five >log ;;
        esac
        said $line "$2/heard"
    done
    kill "$watcher" && wait "$watcher" 2>/dev/null
    cat "$2/heard"
}

needs_tail_trees="timeout python3"
make_tail_trees() { make_trees "$1"; }
use_tail_trees() {
    local watcher
    cd "$1" || return
    : >"$2/heard"
    cp one/top d/log
    timeout 90 tail -F d/log >"$2/heard" 2>/dev/null &
    watcher=$!
    lines() { for _ in $(seq 150); do (($(wc -l <"$1") >= $2)) && return; sleep 0.1; done; }
    lines "$2/heard" 1
    replace_at_once two/top d/log "$2"
    lines "$2/heard" 2
    echo more >>d/log
    lines "$2/heard" 3
    remove_at_once d/log
    sleep 3
    copy_at_once one/sub/first d/log
    lines "$2/heard" 4
    replace_at_once two d "$2" && sleep 3
    copy_at_once one/top d/log
    lines "$2/heard" 5
    kill "$watcher" && wait "$watcher" 2>/dev/null
    cat "$2/heard"
}
