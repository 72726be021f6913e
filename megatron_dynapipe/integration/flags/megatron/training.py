"""Megatron's arguments of training, its precision and its ranks."""

from megatron_dynapipe.integration.flags.megatron.decisions import Group

GROUPS = (
    Group(
        "regularization",
        supported="""
        --weight-decay --apply-wd-to-qk-layernorm --clip-grad --adam-beta1 --adam-beta2 --adam-eps --sgd-momentum
        --no-weight-decay-cond-type
        """,
        ignored={
            "it goes with an --optimizer that is refused": """
            --muon-momentum --muon-no-split-qkv --muon-nesterov --muon-scale-mode --muon-fp32-matmul-prec
            --muon-coefficient-type --muon-num-ns-steps --muon-tp-mode --muon-extra-scale-factor
            --muon-scalar-optimizer --lion-beta1 --lion-beta2
            """,
        },
    ),
    Group(
        "training",
        supported="""
        --micro-batch-size --global-batch-size --empty-unused-memory-level
        --check-weight-hash-across-dp-replicas-interval --gpu-sniff-test-interval --train-sync-interval --train-iters
        --train-samples --exit-interval --exit-duration-in-mins --exit-signal-handler --exit-signal
        --exit-signal-handler-for-training --manual-gc --manual-gc-interval --no-manual-gc-eval --batch-size
        --recompute-activations --no-check-for-nan-in-loss-and-grad --check-for-large-grads
        --result-rejected-tracker-filename --checkpoint-activations --no-masked-softmax-fusion --no-bias-gelu-fusion
        --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --rope-type --optimizer
        --optimizer-cpu-offload --optimizer-cuda-graph --optimizer-offload-fraction
        --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d --dump-param-to-param-group-map
        --no-pin-cpu-grads --no-pin-cpu-params --dataloader-type --no-persist-layer-norm
        --no-gradient-accumulation-fusion --use-mcore-models
        """,
        refused={
            "a plan's number of samples is fixed": """
            --rampup-batch-size --step-batch-size-schedule
            """,
            "Megatron skips by taking one item per micro-batch, and an item is a whole planned iteration": """
            --iterations-to-skip
            """,
        },
        ignored={
            "it goes with --rampup-batch-size, which is refused": """
            --decrease-batch-size-if-needed
            """,
            "samples come from --dynapipe-data": """
            --exit-signal-handler-for-dataloader
            """,
            "it goes with --tp-comm-overlap, which is refused": """
            --tp-comm-overlap-cfg
            """,
            "Megatron does not look at it": """
            --use-flash-attn
            """,
        },
    ),
    Group(
        "RNG and initialization",
        supported="""
        --seed --te-rng-tracker --data-parallel-random-init --init-method-xavier-uniform
        """,
        refused={
            "random states in CUDA graphs cannot be set for each layer": """
            --inference-rng-tracker
            """,
        },
    ),
    Group(
        "learning rate and weight decay",
        supported="""
        --lr-decay-style --lr-wsd-decay-style --lr-decay-iters --lr-decay-samples --lr-wsd-decay-iters
        --lr-wsd-decay-samples --lr-warmup-fraction --lr-warmup-iters --lr-warmup-samples --lr-warmup-init
        --override-opt_param-scheduler --use-checkpoint-opt_param-scheduler --start-weight-decay --end-weight-decay
        --weight-decay-incr-style --lr --warmup --min-lr --decoupled-lr --decoupled-min-lr
        """,
        refused={
            "nothing would be trained": """
            --freeze-all-layers
            """,
        },
    ),
    Group(
        "mixed precision",
        supported="""
        --grad-reduce-in-bf16 --loss-scale --initial-loss-scale --min-loss-scale --loss-scale-window --hysteresis
        --attention-softmax-in-fp32 --accumulate-allreduce-grads-in-fp32
        """,
        refused_for_t5={
            "the stages of a T5 do not look at it": """
            --fp16-lm-cross-entropy
            """,
        },
        ignored={
            "it goes with --fp8-format or --fp4-format, which are refused": """
            --reuse-grad-buf-for-mxfp8-param-ag
            """,
            "there are no Mamba layers": """
            --mamba-training-ssm-states-dtype
            """,
        },
    ),
    Group(
        "distributed init",
        supported="""
        --distributed-backend --distributed-timeout-minutes --no-align-grad-reduce --local-rank
        --nccl-communicator-config-path --disable-gloo-process-groups --use-sharp --sharp-enabled-group
        --high-priority-stream-groups --distributed-timeout-seconds-after-init --flight-recorder-dump-path
        --flight-recorder-trace-buffer-size --no-flight-recorder-dump-on-timeout --flight-recorder-include-stack-trace
        --no-flight-recorder-include-only-active --no-flight-recorder-extra-dump-on-exec --disable-jit-fuser
        --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --pipeline-model-parallel-layout
        --model-parallel-size --num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank
        --overlap-grad-reduce --ddp-num-buckets --ddp-bucket-size --ddp-pad-buckets-for-high-nccl-busbw
        --ddp-reduce-scatter-with-fp32-accumulation --ddp-param-name-patterns-for-fp32-local-accumulation
        --ddp-average-in-collective --overlap-param-gather --overlap-param-gather-with-optimizer-step
        --no-align-param-gather --use-distributed-optimizer --use-nccl-ub --disable-symmetric-registration
        --create-all-gather-group --no-gradient-reduce-div-fusion --num-distributed-optimizer-instances
        """,
        refused={
            "process groups must exist when a run begins": """
            --lazy-mpu-init
            """,
            "planned passes hold back the gradient reduction of DDP, and FSDP has another": """
            --use-megatron-fsdp --use-torch-fsdp2
            """,
            "plans take the ranks of a stage to lie side by side on a node": """
            --use-tp-pp-dp-mapping
            """,
            "nothing would be trained": """
            --fake-process-group
            """,
        },
        ignored={
            "messages between stages have process groups and an order of their own": """
            --no-overlap-p2p-communication
            """,
            "it goes with an --optimizer that is refused": """
            --no-use-layer-wise-param-layout
            """,
            "it goes with FSDP, which is refused": """
            --fsdp-manual-registration --data-parallel-sharding-strategy --outer-dp-sharding-strategy
            --fsdp-double-buffer --suggested-communication-unit-size --enable-full-sharding-in-hsdp
            --torch-fsdp2-no-reshard-after-forward
            """,
            "it goes with --fp8-format or --fp4-format, which are refused": """
            --keep-fp8-transpose-cache
            """,
            "it goes with context parallelism, which is refused": """
            --cp-comm-type
            """,
        },
    ),
    Group(
        "validation",
        supported="""
        --eval-iters --eval-interval --start-eval-at-iter --eval-global-batch-size --skip-train --test-mode
        """,
        refused={
            "the plan decides the samples of a micro-batch": """
            --eval-micro-batch-size
            """,
            "evaluation runs --eval-iters planned iterations": """
            --full-validation
            """,
            "there is one validation split": """
            --multiple-validation-sets
            """,
        },
        ignored={
            "it goes with --multiple-validation-sets, which is refused": """
            --validation-set-names
            """,
        },
    ),
    Group(
        "rerun engine",
        supported="""
        --error-injection-rate --error-injection-type --rerun-mode
        """,
        refused={
            "sums over micro-batches of different sizes cannot be compared": """
            --check-for-spiky-loss
            """,
        },
    ),
    Group(
        "In-process restart",
        refused={
            "a process that starts again in place would meet the process groups and plans it has left": """
            --inprocess-restart
            """,
        },
        ignored={
            "it goes with --inprocess-restart, which is refused": """
            --inprocess-max-iterations --inprocess-monitor-thread-interval --inprocess-monitor-process-interval
            --inprocess-progress-watchdog-interval --inprocess-heartbeat-interval --inprocess-soft-timeout
            --inprocess-hard-timeout --inprocess-heartbeat-timeout --inprocess-barrier-timeout
            --inprocess-completion-timeout --inprocess-last-call-wait --inprocess-termination-grace-time
            --inprocess-granularity --inprocess-active-world-size --inprocess-empty-cuda-cache
            """,
        },
    ),
    Group(
        "ft_package",
        supported="""
        --enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters
        """,
    ),
    Group(
        "fault injector",
        supported="""
        --fault-injector-ranks --fault-injector-num-ranks --fault-injector-fault-types
        --fault-injector-fault-probabilities --fault-injector-fault-delay --fault-injector-delay-start-iteration
        --fault-injector-mtti-seconds --fault-injector-offset-seconds --fault-injector-seed
        """,
    ),
    Group(
        "autoresume",
        supported="""
        --adlr-autoresume --adlr-autoresume-interval
        """,
    ),
)
"""The groups, under the titles they have in Megatron's --help."""
