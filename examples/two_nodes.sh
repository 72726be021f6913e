#!/usr/bin/env bash
# Trains GPT 13B on two nodes of eight GPUs. Run it on both, with the first node's address and 0 or 1:
#
#   examples/two_nodes.sh 10.0.0.1 0        # on 10.0.0.1
#   examples/two_nodes.sh 10.0.0.1 1        # on the other
#
# Flags that follow are handed on and win over the file: --dynapipe-data …, --train-iters …
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

if (($# < 2)); then
    echo "usage: ${0##*/} FIRST_NODE_ADDRESS NODE_RANK [flag …]" >&2
    exit 2
fi
first=$1 node=$2
shift 2

# The plan store listens where the other node reaches the first; its password crosses that network unencrypted.
exec ${PYTHON:-.venv/bin/python} -m torch.distributed.run \
    --nnodes 2 --node-rank "$node" --nproc-per-node "${GPUS_PER_NODE:-8}" \
    --master-addr "$first" --master-port "${MASTER_PORT:-29400}" \
    "${SCRIPT:-pretrain_gpt_multitask.py}" \
    --dynapipe-config "${CONFIG:-configs/gpt_13b_40layers.yaml}" \
    --dynapipe-store-bind "$first" \
    "$@"
