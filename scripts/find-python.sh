#!/usr/bin/env bash
# Prints the path of a Python that can run this project: 3.12 or 3.13, and really able to start (a pyenv shim on
# PATH may refuse), with what a virtual environment needs. None found: one line, a hint, exit 2.
set -u

# What the pinned wheels exist for, and what `python -m venv` and pip need; Debian splits ensurepip off.
PROBE='
import sys, sysconfig
if not (3, 12) <= sys.version_info[:2] <= (3, 13) or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
import ctypes, ensurepip, ssl, venv
print(sys.executable)
'

probe() { # the path of the interpreter behind the command, or nothing
    "$1" -I -c "$PROBE" 2>/dev/null </dev/null
}

candidates() {
    local name
    for name in python3.12 python3.13 python3 python; do
        type -aP "$name"
    done
    for name in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
        ls -d "$name"/versions/3.12*/bin/python3 "$name"/versions/3.13*/bin/python3 2>/dev/null
    done
    # Where other installers put theirs.
    ls -d /usr/bin/python3.1[23] /usr/local/bin/python3.1[23] /opt/python/cp31[23]-cp31[23]/bin/python3 \
        "${HOME:-}"/.local/bin/python3.1[23] "${HOME:-}"/.local/share/uv/python/cpython-3.1[23]*/bin/python3 2>/dev/null
    return 0
}

while IFS= read -r candidate; do
    if path=$(probe "$candidate") && [[ -n $path ]]; then
        printf '%s\n' "$path"
        exit 0
    fi
done < <(candidates)

echo "error: no Python 3.12 or 3.13 that runs (with venv and ensurepip) on PATH or under pyenv" >&2
echo "hint: install one, e.g. \`pyenv install 3.12\`, or your system's python3.12 with python3.12-venv" >&2
exit 2
