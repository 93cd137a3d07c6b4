# Programs that watch files.

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

needs_chokidar="node chokidar"
make_chokidar() { make_watched "$1"; }
use_chokidar() {
    local watcher
    cd "$1" || return
    cat >"$2/watch.js" <<'JS'
const chokidar = require(process.argv[2]);
const watcher = chokidar.watch(process.argv.slice(3), { ignoreInitial: true });
watcher.on('all', (event, path) => console.log(event, path)).on('ready', () => console.log('ready'));
setTimeout(() => process.exit(1), 60000);
JS
    : >"$2/heard"
    timeout 60 node "$2/watch.js" "$tools/node_modules/chokidar" "$1/d" "$1/e" >"$2/heard" &
    watcher=$!
    for _ in $(seq 200); do grep -q ready "$2/heard" && break; sleep 0.1; done
    (change_watched "$1")
    settle
    kill "$watcher" && wait "$watcher" 2>/dev/null
    # One change or two are told of a file that is made and written, as time falls.
    sort -u "$2/heard" | grep -v -E '^change .*(new|copy/f|made/x)$'
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
