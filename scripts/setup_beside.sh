#!/usr/bin/env bash
# Sets up .venv-NAME: a copy of .venv by hard links, with the packages of requirements-NAME.lock, for `make test-NAME`.
# Skipped when up to date; scripts/setup.sh has run before.
#
#   scripts/setup_beside.sh bridge    with Megatron-Bridge
#   scripts/setup_beside.sh oldest    with the oldest PyTorch that is supported
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

unset PYTHONHOME PYTHONPATH
export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
FOLDER=.venv-$1
LOCK=requirements-$1.lock
inputs=$({ printf '%s\n' "$PWD"; cat requirements.lock "$LOCK" pyproject.toml; } | sha256sum)

exec 9>.demo/setup.lock  # as scripts/setup.sh: two commands at once wait for each other
flock 9
[[ -f $FOLDER/.done && $(<"$FOLDER/.done") == "$inputs" ]] && exit
echo "setup: making $FOLDER, with what $LOCK has" >&2
rm -rf -- "$FOLDER"
cp -al .venv "$FOLDER"
# Programs and `activate` name the environment that they were written for. sed writes new files, and leaves .venv's alone.
{ grep -lIF --null -- "$PWD/.venv" "$FOLDER"/bin/* || true; } | xargs -0 -r sed -i "s#$PWD/\.venv#$PWD/$FOLDER#g"
pins() {  # with digests, as in scripts/setup.sh
    if [[ $(uname -sm) == "Linux x86_64" ]]; then awk -f scripts/hashed.awk requirements.sha256 "$LOCK"; else cat "$LOCK"; fi
}
"$FOLDER/bin/python" -m pip install --quiet --no-deps -r <(pins) ||
    { printf 'error: pip could not install %s\nhint: %s\n' "$LOCK" "see its message above; run this again" >&2; exit 2; }
printf '%s\n' "$inputs" >"$FOLDER/.done"
