# The stages of a run, for scripts that source this: `stage` runs one and waits for it, `beside` starts one beside others
# once few enough run, `together` waits for all that were started so, and `report` prints how long each took.
#
# Each stage is a process group of its own, which ends with the script, however that ends. What a stage prints that runs
# beside others is kept in a file, and shown in one piece.
# shellcheck shell=bash

stages_folder=$(mktemp -d) || exit 1 # of each stage NAME: what it printed in NAME.log, its seconds in NAME.seconds
stages_times=()
stages_failed=()
stages_running=() # name by process id, which is its group's too
stages_beside_failed=0 # one of those beside others has failed since the last `together`
stages_at_once=3       # how many `beside` lets run
stages_patience=100    # tenths of a second, after each signal, until what it did not end gets the next

# Ends whatever still runs, with all that it has started: asked first, as by Ctrl-C, so that it can tidy up.
stages_end() {
    local code=$? signal group waited
    trap '' INT TERM HUP
    for signal in INT TERM KILL; do
        for group in "${!stages_running[@]}"; do
            kill -"$signal" -- "-$group" 2>/dev/null || unset "stages_running[$group]"
        done
        for ((waited = 0; waited < stages_patience && ${#stages_running[@]}; waited++)); do
            sleep 0.1
            for group in "${!stages_running[@]}"; do
                kill -0 -- "-$group" 2>/dev/null || unset "stages_running[$group]"
            done
        done
    done
    rm -rf "$stages_folder"
    exit "$code"
}
trap stages_end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# stages_begin NAME COMMAND...: starts the command as a job, whose output is kept in a file beside.
stages_begin() {
    local name=$1 begin=$SECONDS
    shift
    set -m # this job is a group of its own, and does not begin with SIGINT ignored
    {
        "$@" 2>&1 | tee -i "$stages_folder/$name.log"
        code=${PIPESTATUS[0]}
        echo "$((SECONDS - begin))" >"$stages_folder/$name.seconds"
        exit "$code"
    } &
    set +m # or bash would write a line about each job that ends
    stages_running[$!]=$name
}

# stages_ended GROUP CODE: what is to be said and kept of a stage that has ended.
stages_ended() {
    local name=${stages_running[$1]} code=$2 seconds
    unset "stages_running[$1]"
    seconds=$(cat "$stages_folder/$name.seconds" 2>/dev/null) || seconds='?' # where a signal ended it
    stages_times+=("$(printf '%-10s %5s s, exit %d' "$name" "$seconds" "$code")")
    printf '== %s: exit %d after %s s\n' "$name" "$code" "$seconds"
    ((code == 0)) || stages_failed+=("$name")
    return "$code"
}

# stage NAME COMMAND...: runs a command, shows what it prints as it comes, and returns its status.
stage() {
    local name=$1 group code
    shift
    printf '\n== %s: %s\n' "$name" "$*"
    stages_begin "$name" "$@"
    group=$!
    wait "$group"
    code=$?
    stages_ended "$group" "$code"
}

# beside NAME COMMAND...: starts a command as soon as fewer than stages_at_once run, and does not wait for its end.
beside() {
    local name=$1
    shift
    while ((${#stages_running[@]} >= stages_at_once)); do
        stages_next || stages_beside_failed=1
    done
    printf '\n== %s: %s (beside others; shown when it has ended)\n' "$name" "$*"
    stages_begin "$name" "$@" >/dev/null
}

# stages_next: waits for one of the stages beside others, shows what it printed and returns its status. It looks, since
# `wait -n` forgets those that have ended while the shell waited for something else.
stages_next() {
    local group code
    while :; do
        for group in "${!stages_running[@]}"; do
            kill -0 "$group" 2>/dev/null || break 2
        done
        sleep 0.1
    done
    wait "$group"
    code=$?
    printf '\n== %s, which ran beside others\n' "${stages_running[$group]}"
    cat "$stages_folder/${stages_running[$group]}.log"
    stages_ended "$group" "$code"
}

# together: waits for all that run beside. Returns 1 if one failed since the last `together`.
together() {
    local failed
    while ((${#stages_running[@]})); do
        stages_next || stages_beside_failed=1
    done
    failed=$stages_beside_failed
    stages_beside_failed=0
    return "$failed"
}

# report: the slowest tests, the seconds of each stage and of all, and which failed. Returns 1 if one did.
report() {
    printf '\n== the slowest tests\n'
    cat "$stages_folder"/*.log | grep -E '^[0-9.]+s (call|setup|teardown) ' | sort -rn | head -n 20
    printf '\n== the stages\n'
    printf '%s\n' "${stages_times[@]}"
    if ((${#stages_failed[@]})); then
        printf '\nfailed: %s (%d s in all)\n' "${stages_failed[*]}" "$SECONDS"
        return 1
    fi
    printf '\nall stages passed (%d s in all)\n' "$SECONDS"
}
