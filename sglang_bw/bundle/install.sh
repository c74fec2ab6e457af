#!/bin/sh
# Installs a bundle of sglang-bw: the patched engine, its locked dependencies and the tool, from these files alone.
#
#   sh install.sh --into DIR [--python PYTHON] [--expect SHA256] [--dry-run]
#   sh install.sh --check [PART...]
#
# Needs sh, tar, sha256sum, awk and the right Python with venv; never the network. Every file is checked before
# anything of it is used. The same command goes on where a killed one stopped.
set -eu
LC_ALL=C
export LC_ALL
unset CDPATH
umask 022
here=$(cd "$(dirname "$0")" && pwd -P)

say() { printf '%s\n' "- $*"; }
die() { # EXIT_CODE MESSAGE HINT
    printf 'error: %s\n' "$2" >&2
    [ -z "${3-}" ] || printf 'hint: %s\n' "$3" >&2
    exit "$1"
}
usage() {
    cat <<'TEXT'
usage: install.sh --into DIR [--python PYTHON] [--expect SHA256] [--dry-run]
       install.sh --check [PART...]

  --into DIR        the environment to make: a new or empty folder, or one that this bundle began
  --python PYTHON   the interpreter to make it with (default: the python3.X on PATH that the bundle is for)
  --expect SHA256   the bundle's digest, as `sglang-bw bundle` printed it
  --dry-run         check everything that is here and this host, and stop
  --check [PART...] check the parts, or only these, and stop
TEXT
}

sha256() { sha256sum <"$1" | cut -d ' ' -f 1; }
fact() { awk -v key="$1" '$1 == key { sub(/^[^ ]+ /, ""); print; exit }' "$here/TARGET"; }
listed() { awk -v name="$1" 'substr($0, 67) == name { print substr($0, 1, 64); exit }' "$here/SHA256SUMS"; }

# --- what the bundle says of itself

check_head() {
    for file in SHA256SUMS TARGET requirements.txt; do
        [ -f "$here/$file" ] || die 81 "$file is missing beside install.sh" "copy the whole folder again"
    done
    digest=$(sha256 "$here/SHA256SUMS")
    if [ -n "$expect" ] && [ "$expect" != "$digest" ]; then
        die 83 "the digest of this bundle is $digest, expected is $expect" \
            "it is another bundle than the one you were told of: do not install it"
    fi
    if grep -Evq '^[0-9a-f]{64}  [A-Za-z0-9 ._+=@,~()!%&#/-]+$' "$here/SHA256SUMS"; then
        die 81 "SHA256SUMS has a line that is no checksum" "copy it again"
    fi
    if cut -c 67- "$here/SHA256SUMS" | grep -Eq '^/|(^|/)\.\.?(/|$)|//|(^|/)-|/$'; then
        die 82 "SHA256SUMS has a path that leaves the folder" "do not use this bundle"
    fi
    for file in TARGET requirements.txt; do
        [ "$(sha256 "$here/$file")" = "$(listed "$file")" ] || die 81 "$file is not what its checksum says" "copy it again"
    done
    name=$(fact name)
    case $name in
        '' | *[!A-Za-z0-9._+-]*) die 82 "the bundle's name is not plain" "do not use this bundle" ;;
    esac
    if grep -Evq '^[a-z0-9-]+==[A-Za-z0-9.+!_-]+ --hash=sha256:[0-9a-f]{64} # [0-9]+$' "$here/requirements.txt"; then
        die 82 "requirements.txt has a line that is no pinned package" "do not use this bundle"
    fi
}

check_part() { # HASH SIZE FILE
    path=$here/$3
    [ -f "$path" ] || { echo "  $3 is missing"; return 1; }
    [ "$(wc -c <"$path")" -eq "$2" ] || { echo "  $3 has $(($(wc -c <"$path"))) bytes, should have $2"; return 1; }
    [ "$(sha256 "$path")" = "$1" ] || { echo "  $3 is not what its checksum says"; return 1; }
}

check_parts() { # [PART...]
    [ -f "$here/PARTS" ] || die 81 "neither wheels/ nor PARTS is beside install.sh" "copy the whole folder again"
    if grep -Evq '^[0-9a-f]{64}  [0-9]+  [A-Za-z0-9._+-]+$' "$here/PARTS" || grep -Eq '  [.-][^ ]*$' "$here/PARTS"; then
        die 81 "PARTS is no list of parts" "copy it again"
    fi
    wrong=0 count=0
    total=$(($(wc -l <"$here/PARTS")))
    while read -r hash size file; do
        wanted=$#
        for part in "$@"; do
            [ "$(basename "$part")" != "$file" ] || wanted=0
        done
        [ "$wanted" -eq 0 ] || continue
        check_part "$hash" "$size" "$file" || wrong=$((wrong + 1))
        count=$((count + 1))
        [ $((count % 10)) -ne 0 ] || say "checked $count of $total parts"
    done <"$here/PARTS"
    [ "$wrong" -eq 0 ] || die 81 "$wrong of $total parts are not whole" "copy these again; the others may stay"
    [ "$count" -gt 0 ] || die 2 "no part of that name: $*"
    say "$count of $total parts are whole"
}

stream() {
    while read -r _ _ file; do cat "$here/$file"; done <"$here/PARTS"
}

check_listing() {
    say "looking at what the archive would unpack"
    { cut -c 67- "$here/SHA256SUMS" && echo SHA256SUMS; } | awk -v top="$name/" '{ print top $0 }' | sort >"$scratch/expected"
    stream | tar -tf - 2>"$scratch/said" | sort >"$scratch/found" || true
    if ! cmp -s "$scratch/expected" "$scratch/found"; then
        odd=$(comm -13 "$scratch/expected" "$scratch/found" | head -n 3 | tr '\n' ' ')
        die 82 "the archive has other files than SHA256SUMS: ${odd:-some are missing}" "do not use this bundle"
    fi
    kinds=$(stream | tar -tvf - 2>/dev/null | cut -c 1 | sort -u | tr -d '\n')
    [ "$kinds" = - ] || die 82 "the archive has members that are no regular files" "do not use this bundle"
}

# --- the host

find_python() {
    version=$(fact python)
    for candidate in ${python:+"$python"} ${python:-"python$version" python3 python}; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        found=$("$candidate" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        [ "$found" = "$version" ] || continue
        python=$(command -v "$candidate")
        return
    done
    die 18 "${python:-this host} is not Python $version, which the bundle is for" "name one with --python PATH"
}

check_host() {
    find_python
    "$python" -I -c 'import venv' 2>/dev/null || die 18 "$python has no venv module" "install it (Debian: python3-venv)"
    "$python" -I - "$(fact machine)" "$(fact glibc)" <<'PYTHON' || exit 18
import platform, sys
machine, glibc = sys.argv[1:]
here = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine())
if here != machine:
    sys.exit("error: the bundle is for %s, this machine is %s" % (machine, here))
name, version = platform.libc_ver()
if name != "glibc":
    sys.exit("error: the wheels need glibc %s, this Python runs on %s" % (glibc, name or "another libc"))
if [int(part) for part in version.split(".")[:2]] < [int(part) for part in glibc.split(".")]:
    sys.exit("error: the wheels need glibc %s, this host has %s" % (glibc, version))
PYTHON
    if [ "$(fact device)" = cuda ] && ! command -v nvidia-smi >/dev/null 2>&1; then
        say "note: nvidia-smi is not on PATH; a CUDA engine needs NVIDIA's driver to start"
    fi
}

check_target() {
    # tar and the start lines of scripts read these in a name as something else.
    case $into in
        *[\"\$\`\\]* | *"$newline"*)
            die 18 "$into has a quote, dollar, backquote, backslash or line end in its name" "choose another folder with --into"
            ;;
    esac
    mark=$into/.sglang-bw-bundle
    if [ -f "$mark" ]; then
        state='' old=''
        read -r state old <"$mark" || true
        # A run that was killed while it wrote the mark left an empty one.
        [ "${old:-$digest}" = "$digest" ] || die 18 "$into is of another bundle ($old)" "choose another folder with --into"
        [ "$state" != complete ] || finish_complete
        say "going on where an earlier run stopped"
    elif [ -e "$into" ] && [ -n "$(ls -A "$into" 2>/dev/null || echo file)" ]; then
        die 18 "$into is there already and was not begun by this bundle" "choose a new or empty folder with --into"
    fi
    above=$into
    while [ ! -e "$above" ]; do above=$(dirname "$above"); done
    [ -d "$above" ] || die 17 "$above is no folder" "choose another folder with --into"
    [ -w "$above" ] || die 17 "$above cannot be written to" "choose another folder with --into"
    needed=$(fact installed_kib)
    [ -d "$here/wheels" ] || needed=$((needed + $(awk '{ sum += $2 } END { printf "%d", sum / 1024 }' "$here/PARTS")))
    # Bytecode, and what is installed already counts for nothing.
    needed=$((needed + needed / 10))
    [ ! -f "$mark" ] || needed=0
    free=$(df -Pk "$above" | awk 'NR == 2 { print $4 }')
    [ "$free" -ge "$needed" ] || die 17 "$into needs $((needed / 1024)) MiB, the disk has $((free / 1024)) MiB" "free some"
}

# Where flock is, a second run waits; pip inherits the lock, so that one which outlives a killed run keeps it.
hold() {
    command -v flock >/dev/null 2>&1 || return 0
    exec 9>>"$mark"
    flock -n 9 && return 0
    say "waiting for another install into $into"
    flock 9
    read -r state old <"$mark" || true
    [ "$state" != complete ] || finish_complete
}

finish_complete() {
    rm -rf "$into/.bundle" "$into/.bundle-pip.log" # a run that was killed at its very end left them
    "$into/bin/sglang-bw" verify || die $? "the engine in $into is not as it was installed" "remove $into and install again"
    say "nothing to do: this bundle is installed in $into"
    exit 0
}

# --- installing

unpack() {
    stage=$into/.bundle
    if [ -d "$here/wheels" ]; then
        source=$here
        return
    fi
    source=$stage/$name
    if [ ! -f "$stage/unpacked" ]; then
        rm -rf "$stage"
        mkdir "$stage"
        total=$(($(wc -l <"$here/SHA256SUMS") + 1))
        say "unpacking $total files"
        stream | tar -xvof - -C "$stage" 2>&1 | awk -v total="$total" \
            'NR % 25 == 0 { print "- unpacked " NR " of " total " files"; fflush() }' || true
        odd=$(find "$stage" ! -type d \( ! -type f -o -links +1 \) | head -n 1)
        [ -z "$odd" ] || die 82 "$odd is no regular file of its own" "do not use this bundle"
    fi
}

check_files() {
    wrong=0 count=0
    total=$(($(wc -l <"$here/SHA256SUMS")))
    say "checking the sha256 of $total files"
    while IFS= read -r line; do
        file=${line#*  }
        if [ ! -f "$source/$file" ] || [ "$(sha256 "$source/$file")" != "${line%%  *}" ]; then
            echo "  $file is missing or not what its checksum says"
            wrong=$((wrong + 1))
        fi
        count=$((count + 1))
        [ $((count % 50)) -ne 0 ] || say "checked $count of $total files"
    done <"$here/SHA256SUMS"
    if [ "$wrong" -ne 0 ]; then
        [ "$source" = "$here" ] || rm -rf "$stage"
        die 81 "$wrong files are not what their checksums say" "is the disk full? Else copy the bundle again"
    fi
    [ "$source" = "$here" ] || : >"$stage/unpacked"
}

pip_install() { # PIP..., as Python is told to run it; installs what stands in the batch
    env PIP_CONFIG_FILE=/dev/null "$into/bin/python" -I "$@" --isolated --no-input --disable-pip-version-check \
        install --no-index --find-links "$source/wheels" --no-deps --only-binary :all: --require-hashes \
        --no-warn-script-location --root-user-action ignore --progress-bar off --requirement "$scratch/batch" \
        >>"$log" 2>&1 </dev/null ||
        {
            tail -n 5 "$log" >&2
            die 19 "pip failed (all it said is in $log)" "the same command goes on where this one stopped"
        }
}

# A distribution is whole when its RECORD names what pip writes last; what a killed pip left is installed again.
clear_halves() {
    for info in "$into"/lib/python*/site-packages/*.dist-info; do
        [ -d "$info" ] || continue
        grep -q 'dist-info/INSTALLER,' "$info/RECORD" 2>/dev/null || rm -rf "$info"
    done
}

install_wheels() {
    log=$into/.bundle-pip.log
    [ -f "$into/bin/python" ] || "$python" -I -m venv --without-pip "$into" || die 19 "$python makes no environment in $into"
    clear_halves
    all=$(($(wc -l <"$here/requirements.txt"))) all_mb=$(awk '{ sum += $NF } END { print sum + 0 }' "$here/requirements.txt")
    # pip comes first, and runs out of its own wheel for that.
    head -n 1 "$here/requirements.txt" >"$scratch/batch"
    pip_install "$(echo "$source"/wheels/pip-*.whl)/pip"
    begun=0 begun_mb=0 in_batch=0 batch_mb=0
    : >"$scratch/batch"
    while IFS= read -r line; do
        mb=${line##*# }
        # A large wheel goes alone, so that no line stands for minutes.
        if [ "$in_batch" -ge 16 ] || { [ "$in_batch" -gt 0 ] && [ $((batch_mb + mb)) -gt 150 ]; }; then install_batch; fi
        echo "$line" >>"$scratch/batch"
        in_batch=$((in_batch + 1)) batch_mb=$((batch_mb + mb))
    done <"$here/requirements.txt"
    [ "$in_batch" -eq 0 ] || install_batch
}

install_batch() {
    first=$(head -n 1 "$scratch/batch")
    rest=
    [ "$in_batch" -eq 1 ] || rest=" and $((in_batch - 1)) more"
    say "installing ${first%% *}$rest ($begun of $all packages, $begun_mb of $all_mb MB are there)"
    pip_install -m pip
    begun=$((begun + in_batch)) begun_mb=$((begun_mb + batch_mb)) in_batch=0 batch_mb=0
    : >"$scratch/batch"
}

install_extras() {
    for kind in recipes models; do
        [ -d "$source/$kind" ] || continue
        mkdir -p "$into/share/sglang-bw"
        rm -rf "$into/share/sglang-bw/$kind"
        cp -R "$source/$kind" "$into/share/sglang-bw/$kind"
        say "$kind are in $into/share/sglang-bw/$kind"
    done
}

into='' python='' expect='' check='' dry=''
while [ $# -gt 0 ]; do
    case $1 in
        --into | --python | --expect)
            [ $# -ge 2 ] || die 2 "$1 needs a value"
            case $1 in
                --into) into=$2 ;;
                --python) python=$2 ;;
                --expect) expect=$(printf '%s' "$2" | tr 'A-F' 'a-f') ;;
            esac
            shift 2
            ;;
        --check) check=1; shift; break ;;
        --dry-run) dry=1; shift ;;
        -h | --help) usage; exit 0 ;;
        *) usage >&2; die 2 "unknown option $1" ;;
    esac
done
[ -n "$into$check$dry" ] || { usage >&2; die 2 "--into DIR is missing"; }
for program in tar sha256sum awk; do
    command -v "$program" >/dev/null 2>&1 || die 18 "$program is not on PATH"
done
newline='
'
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

check_head
say "$name, digest $digest"
[ "$(fact left_out)" = - ] || say "left out of this bundle: $(fact left_out)"
if [ -n "$check" ]; then
    check_parts "$@"
    exit 0
fi
check_host
if [ -n "$into" ]; then
    case $into in /*) ;; *) into=$(pwd -P)/$into ;; esac
    check_target
fi
if [ ! -d "$here/wheels" ]; then
    say "checking the parts"
    check_parts
    check_listing
fi
if [ -n "$dry" ]; then
    say "dry run: everything that is here is whole and this host fits; nothing was changed"
    exit 0
fi
mkdir -p "$into"
[ -s "$mark" ] || echo "begun $digest" >"$mark"
hold
unpack
check_files
install_wheels
install_extras
say "verifying the engine"
"$into/bin/sglang-bw" verify || die $? "the installed engine is not the recorded one"
echo "complete $digest" >"$mark"
rm -rf "$into/.bundle" "$into/.bundle-pip.log"
say "installed in $into; try: $into/bin/sglang-bw doctor, and $into/bin/sglang-bw serve tiny"
