"""Megatron's arguments of what is not planned training."""

from megatron_dynapipe.integration.flags.megatron.decisions import Group

GROUPS = (
    Group(
        "rl",
        refused={
            "it trains on what a model generates, not on planned samples": """
            --perform-rl-step
            """,
        },
        ignored={
            "it goes with --perform-rl-step, which is refused": """
            --rl-prompts-per-eval --grpo-prompts-per-step --grpo-group-size --rl-generation-lag
            --rl-submission-granularity --rl-consumption-granularity --grpo-iterations --grpo-clamp-eps-lower
            --grpo-clamp-eps-upper --grpo-kl-beta --grpo-entropy-term-weight --grpo-filter-groups-with-same-reward
            --langrl-env-config --rl-default-temperature --rl-default-top-p --rl-default-top-k
            --rl-offload-optimizer-during-inference --rl-kv-cache-management-mode --rl-persist-cuda-graphs
            --rl-partial-rollouts --rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef
            --rl-use-sequence-packing --rl-sequence-packing-max-sequences-per-bin --rl-sequence-packing-algo
            --rl-training-cuda-graphs --rl-inference-tensor-model-parallel-size
            --rl-inference-pipeline-model-parallel-size --rl-inference-expert-model-parallel-size
            --rl-inference-expert-tensor-model-parallel-size --rl-inference-model-unified-memory-level
            --rl-offload-inference-model-weights-when-idle --refit-method --rl-verify-model-weights-swap
            --rl-skip-bos-token --rl-profile --rl-profile-dir --rl-inference-parsers --rl-num-parallel-generations
            --rl-num-parallel-generation-batches --rl-generation-batch-size --rl-parallel-generation-tasks
            """,
        },
    ),
    Group(
        "Logits Distillation",
        refused={
            "it keeps logits by their place in Megatron's own dataset": """
            --logits-save-dir --logits-load-dir
            """,
        },
        ignored={
            "it goes with --logits-save-dir or --logits-load-dir, which are refused": """
            --logits-save-top-k --logits-save-top-p --logits-save-top-p-min-k --logits-save-dtype
            --logits-load-decode-threads --logits-load-prefetch-factor --logits-load-msc-prefetch-depth
            --logits-load-kd-loss-alpha --logits-load-ignore-errors
            """,
        },
    ),
    Group(
        "biencoder",
        ignored={
            "it is for retrieval models": """
            --ict-head-size --biencoder-projection-dim --biencoder-shared-query-context-model --ict-load
            --bert-load --titles-data-path --query-in-block-prob --use-one-sent-docs --evidence-data-path
            --retriever-report-topk-accuracies --retriever-score-scaling --block-data-path --embedding-path
            --indexer-batch-size --indexer-log-interval
            """,
        },
    ),
    Group(
        "vision",
        ignored={
            "it is for vision models": """
            --num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction --data-per-class-fraction
            --no-data-sharding --head-lr-mult --vision-pretraining --vision-pretraining-type
            --vision-backbone-type --swin-backbone-type --mask-type --mask-factor --iter-per-epoch
            --dino-local-img-size --dino-local-crops-number --dino-head-hidden-size --dino-bottleneck-size
            --dino-freeze-last-layer --dino-norm-last-layer --dino-warmup-teacher-temp --dino-teacher-temp
            --dino-warmup-teacher-temp-epochs
            """,
        },
    ),
    Group(
        "inference",
        ignored={
            "it is for inference": """
            --inference-batch-times-seqlen-threshold --max-tokens-to-oom --output-bert-embeddings
            --bert-embedder-type --use-legacy-static-engine --inference-max-requests --inference-max-seq-length
            --inference-dynamic-batching --inference-dynamic-batching-buffer-size-gb
            --inference-dynamic-batching-paused-buffer-size-gb --inference-dynamic-batching-mamba-memory-ratio
            --inference-dynamic-batching-block-size --inference-dynamic-batching-max-requests
            --inference-dynamic-batching-max-tokens --inference-dynamic-batching-num-cuda-graphs
            --inference-dynamic-batching-track-paused-request-events
            --inference-dynamic-batching-track-generated-token-events --decode-only-cuda-graphs
            --inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens
            --inference-dynamic-batching-unified-memory-level --enable-chunked-prefill --num-speculative-tokens
            --inference-dynamic-batching-prefix-caching
            --inference-dynamic-batching-prefix-caching-eviction-policy
            --inference-dynamic-batching-prefix-caching-coordinator-policy
            --inference-dynamic-batching-prefix-caching-routing-alpha
            --inference-dynamic-batching-prefix-caching-mamba-gb
            --inference-dynamic-batching-cuda-graph-mixed-prefill-count
            --inference-dynamic-batching-cuda-graph-sizing-distribution
            --inference-dynamic-batching-sampling-backend --use-same-sampling-seed-across-dp-ranks
            --inference-dynamic-batching-async-sched-mode --inference-dynamic-batching-logprobs-mode
            --inference-logging-step-interval --inference-text-gen-server-logging --inference-wandb-logging
            --inference-coordinator-port --inference-use-synchronous-zmq-collectives
            --inference-disable-ep-consensus --inference-shards
            """,
            "it goes with --cuda-graph-impl, which is refused": """
            --cuda-graph-scope --cuda-graph-modules
            """,
            "there are no Mamba layers": """
            --mamba-inference-conv-states-dtype --mamba-inference-ssm-states-dtype
            """,
        },
    ),
)
"""The groups, under the titles they have in Megatron's --help."""
