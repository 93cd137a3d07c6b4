# Sourced by `test`: runs a command with a deadline, so that a hang is told and ends.

# bounded SECONDS LOG COMMAND... runs a command, shows its output and appends it to LOG. The status
# is the command's. At the deadline it tells the processes and stacks of the hang, ends all mounts of
# Ramet that were not there before, all processes that the command left in its group, and all of
# programs below the target folder, and returns 124. The output goes through a file: a process that
# is left behind holds no pipe that somebody reads.
bounded() {
    local seconds="$1" log="$2" status=0 start command shown mounts
    shift 2
    mounts="$(ramet_mounts)"
    start=$(($(wc -c <"$log") + 1))
    setsid "$@" >>"$log" 2>&1 </dev/null &
    command=$!
    tail --pid="$command" -s 0.5 -c "+$start" -f "$log" &
    shown=$!
    (
        # The deadline is over when the command has ended.
        timeout "$seconds" tail --pid="$command" -f /dev/null && exit
        {
            printf '\n== no end after %s s: %s\n' "$seconds" "$*"
            tell_processes "$command"
        } >>"$log" 2>&1
        end_mounts "$mounts"
        end_processes "$command"
    ) &
    wait "$command" || status=$?
    wait "$shown" || true
    wait $! || true
    if ((status > 128)) && tail -n 400 "$log" | grep -q '^== no end after'; then status=124; fi
    return "$status"
}

# The processes of a group, and those that run a program below the target folder.
processes_of() {
    local group="$1" programs pid exe
    programs="$(target_dir)"
    for pid in /proc/[0-9]*; do
        pid="${pid#/proc/}"
        exe="$(readlink "/proc/$pid/exe" 2>/dev/null)" || continue
        if [[ "$exe" == "$programs"/* || "$(ps -o pgid= -p "$pid" | tr -d ' ')" == "$group" ]]; then
            echo "$pid"
        fi
    done
}

ramet_mounts() {
    awk '$3 ~ /^fuse(blk)?\.ramet$/ { print $2 }' /proc/self/mounts | sort
}

# Ends the connections of mounts that are not among these. A request that waits for a daemon is
# answered then, so that its process can end.
end_mounts() {
    local dir
    for dir in $(comm -13 <(echo "$1") <(ramet_mounts)); do timeout 20 umount -fl "$dir" || true; done
}

tell_processes() {
    local pid task
    for pid in $(processes_of "$1"); do
        printf '%s %s\n' "$pid" "$(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null)"
        for task in "/proc/$pid/task/"*; do
            printf '  %s %s: %s\n' "${task##*/}" "$(cat "$task/comm" 2>/dev/null)" \
                "$(tr '\n' ' ' <"$task/stack" 2>/dev/null || cat "$task/wchan" 2>/dev/null)"
        done
    done
}

end_processes() {
    local pid
    for pid in $(processes_of "$1"); do kill -KILL "$pid" 2>/dev/null || true; done
}
