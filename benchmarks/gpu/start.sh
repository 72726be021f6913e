#!/usr/bin/env bash
# Runs run.py where carry.sh's archive was unpacked; flags are run.py's.
set -euo pipefail
root=$(realpath -- "$(dirname -- "${BASH_SOURCE[0]}")/../..")
python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$root/site" "$root"/wheels/*.whl
export PYTHONPATH=$root/site${PYTHONPATH:+:$PYTHONPATH}
exec python3 "$root/benchmarks/gpu/run.py" "$@"
