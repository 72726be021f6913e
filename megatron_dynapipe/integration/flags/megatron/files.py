"""Megatron's arguments of data, checkpoints and logs."""

from megatron_dynapipe.integration.flags.megatron.decisions import Group

GROUPS = (
    Group(
        "data and dataloader",
        supported="""
        --seq-length --decoder-seq-length
        """,
        refused={
            "samples come from --dynapipe-data": """
            --data-path --train-data-path --valid-data-path --test-data-path --data-args-path
            --per-split-data-args-path --mock-data --fim-data
            """,
            "samples are counted from the start": """
            --phase-transition-iterations
            """,
            "give --seq-length, the longest input": """
            --encoder-seq-length
            """,
            "samples are kept apart already, and every target token counts": """
            --reset-position-ids --reset-attention-mask --dataloader-inter-document-masking --eod-mask-loss
            """,
        },
        refused_in_entry_scripts={
            "the plan's micro-batches bring their own masks": """
            --no-create-attention-mask-in-dataloader
            """,
        },
        ignored={
            "samples come from --dynapipe-data": """
            --split --per-dataset-sequences-path --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap
            --data-cache-path --no-mmap-bin-files --sample-rate --mask-prob --short-seq-prob --num-workers
            --num-dataset-builder-threads --object-storage-cache-path --mid-level-dataset-surplus
            --allow-ambiguous-pad-tokens --fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate
            --fim-no-prefix --fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token
            --fim-eod-token
            """,
        },
    ),
    Group(
        "tokenizer",
        supported="""
        --padded-vocab-size --no-pad-vocab-size --tokenizer-type --tokenizer-model --tokenizer-metadata
        --tokenizer-hf-no-use-fast --tokenizer-hf-no-include-special-tokens --trust-remote-code
        """,
        refused={
            "the vocabulary is that of the dataset's tokenizer": """
            --vocab-size --vocab-file --merge-file --vocab-extra-ids
            """,
        },
        ignored={
            "the vocabulary is that of the dataset's tokenizer": """
            --tokenizer-special-tokens --tiktoken-pattern --tiktoken-num-special-tokens
            --tokenizer-sentencepiece-legacy --no-tokenizer-sentencepiece-ignore-extra-whitespaces
            --null-tokenizer-eod-id --null-tokenizer-pad-id --chat-template
            """,
        },
    ),
    Group(
        "checkpointing",
        supported="""
        --save --save-interval --save-params-interval --save-activations-interval --save-wgrads-interval
        --save-dgrads-interval --save-retain-interval --load --load-main-params-from-ckpt
        --non-persistent-save-interval --non-persistent-ckpt-type --non-persistent-global-ckpt-dir
        --non-persistent-local-ckpt-dir --non-persistent-local-ckpt-algo --finetune --pretrained-checkpoint
        --ckpt-step --use-checkpoint-args --use-mp-args-from-checkpoint-args
        --no-use-tokenizer-model-from-checkpoint-args --exit-on-missing-checkpoint --ckpt-format
        --auto-detect-ckpt-format --ckpt-convert-format --ckpt-convert-save
        --ckpt-convert-update-legacy-dist-opt-format --no-ckpt-fully-parallel-save --async-save --async-strategy
        --use-persistent-ckpt-worker --async-ckpt-cpu-priority --async-ckpt-io-priority --async-ckpt-use-cpu-shm
        --ckpt-fully-parallel-load --ckpt-fully-parallel-load-exchange-algo --ckpt-fully-parallel-save-process-group
        --ckpt-fully-parallel-load-process-group --ckpt-assume-constant-structure
        --no-ckpt-load-validate-sharding-integrity --dist-ckpt-strictness --dist-ckpt-save-pre-mcore-014
        --dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient --replication
        --replication-jump --replication-factor --verify-integrity --no-save-optim --no-save-rng --no-load-optim
        --no-load-rng --override-ckpt-iteration --use-dist-ckpt --dist-ckpt-format --dist-ckpt-workers
        --ckpt-fully-parallel-save
        """,
        ignored={
            "it goes with --num-experts, which is refused": """
            --save-tokens-per-expert-interval
            """,
            "it goes with FSDP, which is refused": """
            --no-strict-fsdp-dtensor-load
            """,
            "it goes with --fp8-format or --fp4-format, which are refused": """
            --no-stream-ckpt-dequant
            """,
        },
    ),
    Group(
        "logging",
        supported="""
        --log-interval --log-params-norm --log-throughput --log-progress --timing-log-level --timing-log-option
        --tensorboard-dir --tensorboard-log-interval --tensorboard-queue-size --log-timers-to-tensorboard
        --no-log-loss-scale-to-tensorboard --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard
        --log-memory-interval --log-device-memory-used --log-num-zeros-in-grad --no-barrier-with-level-1-timing
        --log-world-size-to-tensorboard --wandb-project --wandb-exp-name --wandb-save-dir --wandb-entity
        --logging-level --log-energy
        """,
        refused={
            "it clips by attention's largest logit, which the attention of planned runs does not record": """
            --log-max-attention-logit
            """,
        },
        ignored={
            "it goes with --num-experts, which is refused": """
            --moe-routing-trace-path --moe-routing-trace-max-training-iters --moe-routing-trace-capture-logits
            --moe-routing-trace-capture-hidden-states --moe-routing-trace-dump-weights
            """,
        },
    ),
    Group(
        "profiling",
        supported="""
        --profile --profile-step-start --profile-step-end --use-pytorch-profiler --pytorch-profiler-collect-shapes
        --pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra --profile-ranks --record-memory-history
        --memory-snapshot-path --record-shapes --nvtx-ranges
        """,
    ),
    Group(
        "straggler",
        ignored={
            "it measures inside Megatron's own step function": """
            --log-straggler
            """,
            "it goes with --log-straggler, which has no effect": """
            --straggler-ctrlr-port --straggler-minmax-count --disable-straggler-on-startup
            """,
        },
    ),
    Group(
        "workload inspector",
        supported="""
        --run-workload-inspector-server
        """,
    ),
    Group(
        "one logger",
        supported="""
        --no-one-logger --one-logger-project --one-logger-run-name --one-logger-async --app-tag-run-name
        --app-tag-run-version
        """,
    ),
    Group(
        "msc",
        supported="""
        --enable-msc --disable-msc
        """,
    ),
    Group(
        "sft",
        refused={
            "its dataset packs sequences; plans do not": """
            --sft
            """,
        },
        ignored={
            "it goes with --sft, which is refused": """
            --sft-tokenizer-prompt-format
            """,
        },
    ),
)
"""The groups, under the titles they have in Megatron's --help."""
