#!/usr/bin/env bash
# The README's commands where nothing is prepared: a clean clone of HEAD, an empty home and empty caches, and only
# the system's own programs on PATH, git and make among them. As a new user when root runs it, else with an empty HOME.
#
#   scripts/fresh_machine.sh [--keep] [--target demo|test|tool]... PYTHON...
#   scripts/fresh_machine.sh 3.11 3.12 3.13        # `make demo` with each that is here
#
# What an administrator sets for everybody stays: proxies, certificates, the settings of pip and uv.
set -euo pipefail
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
keep='' targets=() pythons=()
while [ $# -gt 0 ]; do
    case $1 in
        --keep) keep=1 ;;
        --target) targets+=("${2:?--target needs a name}"); shift ;;
        -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
        -*) echo "error: unknown option $1" >&2; exit 2 ;;
        *) pythons+=("$1") ;;
    esac
    shift
done
[ ${#targets[@]} -gt 0 ] || targets=(demo)
[ ${#pythons[@]} -gt 0 ] || { echo "error: which Python? For example 3.12, or a path" >&2; exit 2; }

interpreter() { # The real program of a version: shims of version managers need a home.
    "$(command -v "$1" || command -v "python$1")" -c 'import sys; print(sys.executable)' 2>/dev/null
}

settings() {
    env | grep -E '^(PIP_|UV_|SSL_CERT|REQUESTS_CA|CURL_CA|[a-zA-Z]+_(proxy|PROXY)=|CI=)' || true
}

try() { # PYTHON
    local python home user='' as=() started code=0
    python=$(interpreter "$1") || { echo "python $1: not here"; return 0; }
    home=$(mktemp -d "${TMPDIR:-/tmp}/fresh-XXXXXX")
    if [ "$(id -u)" = 0 ] && command -v useradd >/dev/null && command -v runuser >/dev/null; then
        user=fresh$$
        useradd --home-dir "$home" --no-create-home --shell /bin/sh "$user"
        if runuser -u "$user" -- "$python" -c pass 2>/dev/null; then
            as=(runuser -u "$user" --)
        else
            echo "python $1: $python does not run as a new user: not readable, or its library is not; an empty home instead"
            userdel "$user"
            user=''
        fi
    fi
    git clone --quiet "$checkout" "$home/project"
    [ -z "$user" ] || chown -R "$user" "$home"
    mapfile -t passed < <(settings)
    for target in "${targets[@]}"; do
        started=$SECONDS
        (cd "$home/project" && "${as[@]}" env -i HOME="$home" PATH=/usr/bin:/bin LANG=C.UTF-8 "${passed[@]}" \
            make "$target" PYTHON="$python") || code=$?
        echo "python $("$python" -V | cut -d ' ' -f 2)${user:+, as a new user}: make $target ended with $code after $((SECONDS - started)) s"
        [ "$code" = 0 ] || break
    done
    [ -n "$keep" ] || rm -rf "$home"
    [ -z "$user" ] || userdel "$user"
    return "$code"
}

failed=0
for python in "${pythons[@]}"; do try "$python" || failed=1; done
exit "$failed"
