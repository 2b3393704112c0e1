# What the scripts share: saying, asking what this machine has, and a Docker engine that is stopped by whoever started it.
# Sourced from the root of the repository, with `set -euo pipefail`.

palestra=.venv/bin/palestra
engine_pid=
engine_log=

say() { printf '==> [%4ds] %s\n' "$SECONDS" "$*"; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

have() { PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null; }

# unfinished_or_new FOLDER NAME: the first of NAME, NAME-2, ... in FOLDER that is not a run at its end
unfinished_or_new() {
    local name=$2 number=1
    while [ -e "$1/$name/summary.json" ]; do name=$2-$((number += 1)); done
    echo "$name"
}

# Whether packages may be installed here: root, on Debian or a relative of it.
may_install() { [ "$(id -u)" = 0 ] && have apt-get; }

# apt_install PACKAGE...: quietly; its last words on failure, and status 1
apt_install() {
    local log
    log=$(mktemp)
    if ! { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; } >"$log" 2>&1 </dev/null; then
        tail -n 10 "$log" >&2
        rm -f "$log"
        return 1
    fi
    rm -f "$log"
}

engine_answers() { have docker && timeout 20 docker version >/dev/null 2>&1; }

# start_engine: a Docker engine of our own, for as long as this script runs; status 1 when it does not come up
start_engine() {
    local tries
    engine_log=$(mktemp)
    PATH="$PATH:/usr/sbin:/sbin" setsid dockerd >"$engine_log" 2>&1 </dev/null &
    engine_pid=$!
    trap stop_engine EXIT
    for tries in $(seq 60); do
        engine_answers && return
        kill -0 "$engine_pid" 2>/dev/null || break
        sleep 1
    done
    echo "dockerd did not come up (asked $tries times); its last words:" >&2
    tail -n 5 "$engine_log" >&2
    stop_engine
    return 1
}

stop_engine() {
    local left=30
    [ -n "$engine_pid" ] || return 0
    kill "$engine_pid" 2>/dev/null || true
    while kill -0 "$engine_pid" 2>/dev/null && [ $((left -= 1)) -gt 0 ]; do sleep 1; done
    kill -KILL "$engine_pid" 2>/dev/null || true
    rm -f "$engine_log"
    engine_pid=
}
