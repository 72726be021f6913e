#!/usr/bin/env bash
# Sets up .venv and the demo data, step by step; a step whose inputs have not changed is skipped.
#
#   scripts/setup.sh         everything: demo, tests, checkers, documents
#   scripts/setup.sh run     what training and the demo need
#
# A step is done when its stamp holds the digest of its inputs; the stamp is written last, so an interrupted step runs
# again. The checkout's path is an input: an environment and an editable install do not survive a move.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

unset PYTHONHOME PYTHONPATH
export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
NEEDED_KB=9000000  # environment and downloads together
PYTHON=.venv/bin/python
STATE=.venv/.setup
DATA=.demo/data

STEPS=$([[ ${1-} == run ]] && echo 4 || echo 6)

say() { echo "setup: $*" >&2; }
step() { say "step $1 of $STEPS: $2"; }
fail() { printf 'error: %s\nhint: %s\n' "$1" "$2" >&2; exit 2; }

digest() { { printf '%s\n' "$PWD"; cat -- "$@"; } | sha256sum; }
is_done() { [[ -f $1 && $(<"$1") == "$2" ]]; }
mark() { printf '%s\n' "$2" >"$1.new" && mv -- "$1.new" "$1"; }

make_environment() {
    if [[ -f $STATE/unpacking ]]; then
        say "the last set-up did not finish; making .venv anew"
    elif [[ -x $PYTHON ]] && "$PYTHON" -I -c 'import pip' 2>/dev/null; then
        "$PYTHON" -I -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 13))' ||
            fail ".venv holds $("$PYTHON" -V), needed is Python 3.12 or 3.13" "move .venv away and run this again"
        return
    fi
    local found
    found=$(scripts/find-python.sh) || exit 2
    step 1 "making .venv with $found"
    "$found" -m venv --clear .venv || fail "$found could not make .venv" "is its venv module complete, the disk full?"
}

locked() { awk -v group="$1:" '/^# ---/ { inside = $3 == group } inside && /^[a-z]/' requirements.lock; }

install_packages() {  # GROUP STEP: the packages under one heading of the lock file
    local inputs free packages
    packages=$(locked "$1")
    inputs=$(digest - <<<"$packages")
    is_done "$STATE/packages-$1" "$inputs" && return
    step "$2" "downloading and installing $(wc -l <<<"$packages") pinned packages ($1)"
    if ! "$PYTHON" -I -c 'import torch' 2>/dev/null; then
        free=$(df -Pk . | awk 'NR == 2 {print $4}')
        ((free >= NEEDED_KB)) || fail "$((free / 1000000)) GB free here, set-up needs $((NEEDED_KB / 1000000)) GB" \
            "free some space, or clone to another disk"
        say "about 3 GB to download, 6 GB installed; once"
        say "(a host that only plans needs none of this: \`pip install .\` brings planner and commands, without torch)"
    fi
    touch "$STATE/unpacking"  # pip takes a half-unpacked package for installed: see make_environment
    [[ $1 != run ]] || pip_install --quiet -r <(grep '^pip==' <<<"$packages" | hashed)
    pip_install --progress-bar raw --no-compile --no-deps -r <(hashed <<<"$packages") |
        show_progress "$(wc -l <<<"$packages")"
    "$PYTHON" -m compileall -qq -j 0 .venv/lib || true  # on all cores, pip's own on one; templates do not compile
    rm -- "$STATE/unpacking"
    mark "$STATE/packages-$1" "$inputs"
}

hashed() {  # pins, with the digests of their wheels on the machines that these are of: then pip asks for every one
    if [[ $(uname -sm) == "Linux x86_64" ]]; then awk -f scripts/hashed.awk requirements.sha256 -; else cat; fi
}

pip_install() {
    local what=${*: -1}
    PYTHONUNBUFFERED=1 "$PYTHON" -m pip install "$@" ||
        fail "pip could not install ${what/#\/dev\/fd\/*/the packages of requirements.lock}" \
            "see its message above; a network that works is needed once. Run this again"
}

show_progress() {  # pip's output as one line for each package of TOTAL, and one for each tenth of a large download
    local line file words tenth shown=0 count=0
    while read -r line; do
        case $line in
            Progress*)  # BYTES of BYTES
                read -r -a words <<<"$line"
                tenth=$((10 * words[1] / (words[3] + 1)))
                if ((words[3] > 100000000 && tenth > shown)); then
                    say "    $((words[1] / 1000000)) of $((words[3] / 1000000)) MB"
                fi
                shown=$tenth
                ;;
            Collecting* | "Requirement already"*) count=$((count + 1)) ;;
            Processing*)
                file=${line#Processing }
                file=${file%% *}
                count=$((count + 1)) && say "  $count of $1: ${file##*/}"
                ;;
            Downloading* | "Using cached"*) say "  $count of $1: ${line#* }" ;;
            Installing*) say "  unpacking all of them, which takes minutes where torch is among them" ;;
        esac
    done
}

install_project() {  # builds the planner's native core
    local inputs compiler
    inputs=$(shopt -s nullglob; digest requirements.lock pyproject.toml setup.py scripts/build_backend.py csrc/*.* csrc/*/*)
    inputs+=$(type -P "${CXX:-c++}" || echo " no compiler")
    is_done "$STATE/project" "$inputs" && return
    step 3 "building and installing megatron-dynapipe (editable)"
    compiler=$("$PYTHON" scripts/build_backend.py)
    if [[ $compiler ]] && ! "$PYTHON" -I -c 'import ziglang' 2>/dev/null; then
        say "no C++20 compiler works here; fetching one (ziglang, 100 MB)"
        pip_install --quiet --no-deps "$compiler"
    fi
    PYTHONWARNINGS=ignore pip_install --quiet --no-build-isolation --no-deps --editable .
    mark "$STATE/project" "$inputs"
}

fetch_wheels() {  # Megatrons that the tests of patches/ unpack, patch and train; without a network they are skipped
    local inputs wheel
    inputs=$(digest patches/versions.txt)
    is_done "$STATE/wheels" "$inputs" && return
    step 6 "fetching the Megatrons that patches/ are tested on (5 MB)"
    while read -r wheel; do  # one at a time: pip takes two versions of a package for a conflict
        "$PYTHON" -m pip download --quiet --retries 0 --timeout 20 --no-deps --only-binary :all: \
            --dest .venv/.wheels "$wheel" || {
            say "notice: $wheel could not be fetched; the tests that need it are skipped"
            return
        }
    done <patches/versions.txt
    mark "$STATE/wheels" "$inputs"
}

make_demo_data() {
    local inputs
    inputs=$(digest requirements.lock megatron_dynapipe/data/*.py megatron_dynapipe/tools/demo_data.py)
    is_done "$DATA/.setup" "$inputs" && return
    step 4 "building the demo data in $DATA"
    rm -rf -- "$DATA"
    "$PYTHON" -m megatron_dynapipe data demo --output "$DATA" >&2 ||
        fail "the demo data could not be built" "see the message above"
    mark "$DATA/.setup" "$inputs"
}

mkdir -p .demo
exec 9>.demo/setup.lock  # two commands at once: the second waits for the first's set-up
flock -n 9 || { say "waiting for another set-up of this checkout"; flock 9; }
make_environment
mkdir -p "$STATE"
install_packages run 2
install_project
make_demo_data
if [[ ${1-} != run ]]; then
    install_packages check 5
    fetch_wheels
fi
