# git: hard links of a local clone, worktrees, and the questions to watchman.

make_repository() {
    cd "$1" || return
    git init -q -b main
    git config user.name A && git config user.email a@example.org
    for i in $(seq 40); do
        mkdir -p "d$((i % 7))"
        echo "text $i" >"d$((i % 7))/f$i"
    done
    git add -A && GIT_COMMITTER_DATE='@1 +0000' GIT_AUTHOR_DATE='@1 +0000' git commit -q -m first
    echo more >>d1/f1
    GIT_COMMITTER_DATE='@2 +0000' GIT_AUTHOR_DATE='@2 +0000' git commit -q -a -m second
}

needs_git_clone="git"
make_git_clone() { make_repository "$1"; }
use_git_clone() {
    cd "$1" || return
    git status --porcelain | grep -v .out
    git clone -q --local "$1" "$2/copy" || return
    # Objects have two names.
    find "$2/copy/.git/objects" -type f -printf '%n %P\n' | sort
    git -C "$2/copy" fsck --strict
    git -C "$2/copy" log --format=%H
    git -C "$2/copy" gc -q --prune=now && git -C "$2/copy" fsck
    git -C "$2/copy" pull -q
    rm -rf "$2/copy"
    find .git/objects -type f -printf '%n %P\n' | sort
}

needs_git_worktree="git"
make_git_worktree() { make_repository "$1"; }
use_git_worktree() {
    cd "$1" || return
    git worktree add -q -b side "$2/side" || return
    echo side >"$2/side/new"
    git -C "$2/side" add -A && git -C "$2/side" commit -q -m side
    git worktree list | sed -E 's/ +[0-9a-f]{7,} / /'
    git merge -q side && cat new
    git worktree move "$2/side" "$2/moved" && git -C "$2/moved" status --porcelain
    git stash list
    git worktree remove "$2/moved" && git worktree prune -v
    git reset -q --hard HEAD~1 && git status --porcelain | { grep -v .out || true; }
}

# A copy has new inode numbers and times of change, so git reads it once; then it is clean and stays.
needs_git_index="git strace"
make_git_index() { make_repository "$1" && sleep 1.1 && git -C "$1" status --porcelain; }
use_git_index() {
    cd "$1" || return
    echo '.out' >.git/info/exclude
    sleep 1.1
    git status --porcelain
    strace -f -o "$2/trace" -e trace=openat git status --porcelain
    grep -c -E '"d[0-9]/f[0-9]+", O_RDONLY' "$2/trace"
    echo x >d2/f2 && git status --porcelain && git checkout -q d2/f2
    git diff --stat
    git mv d3 d9 && git status --porcelain | sort && git reset -q --hard
}

needs_git_watchman="git watchman perl"
make_git_watchman() { make_repository "$1"; }
use_git_watchman() {
    cd "$1" || return
    echo '.out' >.git/info/exclude
    private_watchman "$2" || return
    cp .git/hooks/fsmonitor-watchman.sample .git/hooks/query-watchman
    git config core.fsmonitor .git/hooks/query-watchman
    git config core.untrackedCache true
    git status --porcelain
    echo changed >d4/f4
    echo new >d4/new
    rm d5/f5
    mv d6 d8
    settle
    git status --porcelain
    git reset -q --hard && git clean -qfd && settle && git status --porcelain
    watchman_ends
}

needs_git_watchman_trees="git watchman perl python3"
make_git_watchman_trees() { make_repository "$1"; }
use_git_watchman_trees() {
    local change words
    cd "$1" || return
    echo '.out' >.git/info/exclude
    private_watchman "$2" || return
    mkdir -p "$2/trees"
    cp -a d1 d2 d3 "$2/trees"
    echo other >>"$2/trees/d2/f2"
    mv "$2/trees/d2/f9" "$2/trees/d2/new"
    cp .git/hooks/fsmonitor-watchman.sample .git/hooks/query-watchman
    git config core.fsmonitor .git/hooks/query-watchman
    git config core.untrackedCache true
    git status --porcelain
    for change in "copy d1 added" "replace d2 d2" "remove d4" "replace d3 added" "remove added" \
        "copy d1 d4" "copy d2/new d5/new" "replace d1/f8 d5/f5" "remove d5/new"; do
        read -r -a words <<<"$change"
        case ${words[0]} in
        copy) copy_at_once "$2/trees/${words[1]}" "${words[2]}" ;;
        replace) replace_at_once "$2/trees/${words[1]}" "${words[2]}" "$2" ;;
        remove) remove_at_once "${words[1]}" ;;
        esac || echo "$change fails"
        settle
        echo "= $change"
        git status --porcelain -uall
    done
    git reset -q --hard && git clean -qfd && settle && git status --porcelain
    watchman_ends
}
