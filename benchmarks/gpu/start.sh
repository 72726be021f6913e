#!/usr/bin/env bash
# Runs run.py with what carry.sh packed; the flags are run.py's. One command line is one turn:
#
#   dynapipe/benchmarks/gpu/start.sh --part correct --output "$OUT/report.json" --budget-s 280    in the unpacked archive
#   benchmarks/gpu/start.sh --part …      in a copy of this checkout that holds the archive as build/gpu.tgz (or .txz)
set -euo pipefail
root=$(realpath -- "$(dirname -- "${BASH_SOURCE[0]}")/../..")
if [[ ! -d $root/site ]]; then
    archives=("$root"/build/gpu.t?z)
    [[ -e ${archives[0]} ]] || { echo "error: expected $root/build/gpu.tgz, which carry.sh packs, found none" >&2; exit 2; }
    folder=$(mktemp -d)
    tar --extract --file "${archives[0]}" --directory "$folder"
    exec "$folder/dynapipe/benchmarks/gpu/start.sh" "$@"
fi
paths=$root/site
for folder in "$root"/with/*/; do
    [[ -d $folder ]] && paths+=:${folder%/}
done
export PYTHONPATH=$paths${PYTHONPATH:+:$PYTHONPATH}
# The CUDA libraries that torch brought, for packages that look for them where a toolkit would be.
nvidia=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
if [[ -d $nvidia ]]; then
    export LD_LIBRARY_PATH=$nvidia/nccl/lib:$nvidia/cudnn/lib:$nvidia/cu13/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export NVTE_CUDA_INCLUDE_DIR=${NVTE_CUDA_INCLUDE_DIR:-$nvidia/cu13/include}
fi
# Transformer Engine's cuDNN: what it takes to find its libraries, tried in half a minute.
if compgen -G "$root/with/*/transformer_engine" >/dev/null; then
    eval "$(python3 "$root/benchmarks/gpu/engine.py")"
fi
exec python3 "$root/benchmarks/gpu/run.py" "$@"
