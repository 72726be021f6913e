#!/usr/bin/env bash
# Runs run.py, or another script of this checkout, with what carry.sh packed; the flags are the script's.
#
#   dynapipe/benchmarks/gpu/start.sh --part correct --output "$OUT/report.json" --budget-s 280    in the unpacked archive
#   dynapipe/benchmarks/gpu/start.sh benchmarks/bridge/training.py --output "$OUT/bridge.json"    another script
#   benchmarks/gpu/start.sh --part …      in a copy of this checkout that holds the archive as build/gpu.tgz (or .txz)
set -euo pipefail
root=$(realpath -- "$(dirname -- "${BASH_SOURCE[0]}")/../..")
if [[ ! -d $root/site ]]; then
    archives=("$root"/build/gpu.t?z)
    [[ -e ${archives[0]} ]] || { echo "error: expected $root/build/gpu.tgz, which carry.sh packs, found none" >&2; exit 2; }
    folder=${TMPDIR:-/tmp}/dynapipe-$(sha256sum <"${archives[0]}" | cut --characters 1-16)  # kept while the machine is
    if [[ ! -d $folder ]]; then
        part=$(mktemp --directory "$folder-XXXX")
        tar --extract --file "${archives[0]}" --directory "$part"
        mv --no-target-directory "$part" "$folder" || [[ -d $folder ]]  # another call may have been faster
    fi
    exec "$folder/dynapipe/benchmarks/gpu/start.sh" "$@"
fi
if [[ ! -e $root/COMPILED ]]; then
    python3 -m compileall -qq -j 0 "$root" >/dev/null 2>&1 || true  # every check's first import would, on a core of its own
    touch "$root/COMPILED"
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
    # Without it Transformer Engine opens the system's cuDNN, if there is one, beside PyTorch's: of two versions none works.
    export CUDNN_HOME=${CUDNN_HOME:-$nvidia/cudnn}
fi
script=benchmarks/gpu/run.py
if [[ ${1:-} == *.py ]]; then
    script=$1
    shift
fi
exec python3 "$root/$script" "$@"
