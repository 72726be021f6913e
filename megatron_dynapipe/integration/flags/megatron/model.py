"""Megatron's arguments of the model and how it is computed."""

from megatron_dynapipe.integration.flags.megatron.decisions import Group

GROUPS = (
    Group(
        "transformer configuration",
        supported="""
        --tensor-model-parallel-size --pipeline-model-parallel-size --sequence-parallel --no-initialization
        --use-cpu-initialization --fp16 --bf16 --deterministic-mode --cross-entropy-loss-fusion
        --cross-entropy-fusion-impl --num-layers --account-for-embedding-in-pipeline-split
        --account-for-loss-in-pipeline-split --hidden-size --num-attention-heads --softmax-type --num-query-groups
        --ffn-hidden-size --kv-channels --hidden-dropout --attention-dropout
        --apply-residual-connection-post-layernorm --norm-epsilon --apply-layernorm-1p --disable-bias-linear
        --add-qkv-bias --glu-linear-offset --activation-func-clamp-value --rotary-interleaved --normalization
        --qk-layernorm --attention-output-gate --calculate-per-token-loss --init-method-std
        --embedding-init-method-std --apply-query-key-layer-scaling --disable-bf16-reduced-precision-matmul
        --recompute-granularity --recompute-method --recompute-num-layers --recompute-modules
        --no-clone-scatter-output-in-embedding --config-logger-dir --mlp-chunks-for-training --transformer-impl
        """,
        refused={
            "replicas are counted without this axis": """
            --tensor-parallel-num-weight-shards
            """,
            "plans do not shard a sequence over ranks": """
            --context-parallel-size --hybrid-context-parallel
            """,
            "there are no experts": """
            --expert-model-parallel-size
            """,
            "its communication buffers are made once, for --seq-length, and micro-batches have many lengths": """
            --tp-comm-overlap
            """,
            "it brings its own schedule": """
            --overlap-moe-expert-parallel-comm
            """,
            "weight gradients put off are computed by Megatron's own schedules alone, so they would be lost": """
            --delay-wgrad-compute --defer-embedding-wgrad-compute
            """,
            "plans know nothing of activations that leave the device, and hold several micro-batches at once": """
            --cpu-offloading-num-layers
            """,
            "its loss is averaged over micro-batches": """
            --mtp-num-layers
            """,
            "it clips by attention's largest logit, which the attention of planned runs does not record": """
            --qk-clip
            """,
            "it replaces a layer's input, which may be a received tensor that the stage still hands on": """
            --distribute-saved-activations
            """,
            (
                "its weights and scales are kept from one iteration to the next by rules of Megatron's own "
                "schedules, its scales are agreed on in every pass, of which replicas have different numbers, and"
                " its kernels want lengths in multiples of 16 or 32"
            ): """
            --fp8-format --fp8-output-proj --fp4-format
            """,
            "a graph is captured for one shape, and micro-batches have many": """
            --enable-cuda-graph --external-cuda-graph --cuda-graph-impl
            """,
            "it counts passes in the order of Megatron's own schedules, and starts anew with each of theirs": """
            --fine-grained-activation-offloading
            """,
        },
        refused_in_entry_scripts={
            "the entry scripts build plain attention, MLP and norms": """
            --qk-l2-norm --multi-latent-attention --experimental-attention-variant
            --use-transformer-engine-op-fuser --use-kitchen-attention --use-grouped-gemm-for-dense-mlp
            --is-hybrid-model
            """,
        },
        refused_with_local_layers={
            "Megatron's local layers do not look at it": """
            --attention-backend --flash-attention-version --fused-residual-rmsnorm --batch-invariant-mode
            --use-te-activation-func
            """,
        },
        refused_for_t5={
            (
                "its encoder's output is of the weights' type and its decoder's state of fp32, and a message has "
                "one type"
            ): """
            --fp32-residual-connection
            """,
            "weights that stages share are made equal as they are built": """
            --init-model-with-meta-device
            """,
            "the stages of a T5 do not look at it": """
            --use-mup --mup-width-mult --mup-base-hidden-size --mup-embedding-mult --mup-output-mult
            --mup-base-head-dim --mup-attn-scale-power
            """,
        },
        ignored={
            "messages between stages have process groups and an order of their own": """
            --pipeline-model-parallel-comm-backend --use-ring-exchange-p2p
            --overlap-p2p-communication-warmup-flush --microbatch-group-size-per-virtual-pipeline-stage
            """,
            "it goes with context parallelism, which is refused": """
            --hierarchical-context-parallel-sizes --max-seqlen-per-dp-cp-rank
            """,
            "it goes with --num-experts, which is refused": """
            --expert-tensor-parallel-size --expert-tensor-parallel-num-weight-shards
            --overlap-dispatch-backward-with-experts-wgrad --ep-overlap-early-attn-memory-release
            --use-fused-weighted-squared-relu --high-priority-a2a-comm-stream
            --moe-shared-expert-intermediate-size --moe-shared-expert-gate --moe-shared-expert-overlap
            --use-grouped-gemm-for-shared-expert --moe-shared-expert-glu-interleave-size --moe-ffn-hidden-size
            --moe-router-topk --moe-enable-routing-replay --moe-router-padding-for-quantization
            --moe-router-padding-for-fp8 --moe-router-num-groups --moe-router-group-topk --moe-router-pre-softmax
            --moe-router-topk-scaling-factor --moe-router-score-function --moe-router-dtype
            --moe-router-enable-expert-bias --moe-router-bias-update-rate --moe-router-quantile-balancing-ema
            --moe-router-force-load-balancing --moe-router-force-biased --moe-grouped-gemm
            --moe-single-grouped-weight --moe-single-grouped-bias --moe-z-loss-coeff --moe-input-jitter-eps
            --moe-token-dispatcher-type --moe-enable-deepep --moe-flex-dispatcher-backend
            --moe-permute-fusion-into-hybridep --moe-hybridep-pad-uneven-dispatch-inputs --moe-per-layer-logging
            --moe-expert-capacity-factor --moe-pad-expert-input-to-capacity
            --moe-pad-experts-for-cuda-graph-inference --moe-token-drop-policy --moe-layer-recompute
            --moe-permute-fusion --moe-router-fusion --moe-apply-probs-on-input --moe-latent-size
            --moe-flex-dispatcher-num-sms --moe-deepep-num-sms --moe-hybridep-num-sms
            --moe-hybridep-num-blocks-permute --moe-hybridep-num-blocks-unpermute
            --moe-hybridep-num-sms-preprocessing --moe-ncclep-static-shape --moe-ncclep-zero-copy
            --moe-mlp-glu-interleave-size --moe-expert-rank-capacity-factor --moe-paged-stash
            --moe-paged-stash-page-size --moe-paged-stash-buffer-size-factor-cuda
            --moe-paged-stash-buffer-size-factor-cpu
            """,
            "it goes with --tp-comm-overlap, which is refused": """
            --no-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs
            --tp-comm-overlap-rs-dgrad --no-tp-comm-split-ag --no-tp-comm-split-rs --tp-comm-bootstrap-backend
            """,
            "it goes with --defer-embedding-wgrad-compute, which is refused": """
            --wgrad-deferral-limit
            """,
            "it goes with --mtp-num-layers, which is refused": """
            --mtp-standalone --mtp-loss-scaling-factor --mtp-use-repeated-layer --mtp-detach-heads
            --mtp-hybrid-override-pattern
            """,
            "it goes with --cpu-offloading-num-layers, which is refused": """
            --cpu-offloading-retain-pinned-cpu-buffers
            """,
            "it goes with --qk-clip, which is refused": """
            --qk-clip-alpha --qk-clip-threshold
            """,
            "it goes with a flag of the attention that is refused": """
            --dsa-indexer-n-heads --dsa-indexer-head-dim --dsa-indexer-topk --dsa-indexer-topk-freq
            --dsa-indexer-skip-topk-offset --dsa-indexer-loss-coeff --dsa-indexer-use-sparse-loss
            --dsa-kernel-backend --dsa-indexer-rope-interleaved --no-dsa-indexer-rotate-activation
            --no-dsa-indexer-scoring-relu --dsa-indexer-k-norm-epsilon --dsa-indexer-k-norm-fp32
            --linear-conv-kernel-dim --linear-key-head-dim --linear-value-head-dim --linear-num-key-heads
            --linear-num-value-heads --kitchen-attention-backend --mrope-section
            """,
            "it goes with --fp8-format or --fp4-format, which are refused": """
            --fp8-recipe --fp8-quantizer-factory --fp8-margin --fp8-interval --fp8-amax-history-len
            --fp8-amax-compute-algo --no-fp8-wgrad --first-last-layers-bf16 --num-layers-at-start-in-bf16
            --num-layers-at-end-in-bf16 --fp4-recipe --fp4-quantizer-factory
            """,
            "it goes with --cuda-graph-impl, which is refused": """
            --cuda-graph-warmup-steps --inference-cuda-graph-scope
            """,
            "it is for inference": """
            --flash-decode --symmetric-ar-type --nccl-all-reduce-for-prefill --inference-fuse-tp-communication
            --inference-disable-triton-nvls-kernels --inference-grouped-gemm-backend
            --inference-moe-disable-fused-quant-kernels --inference-moe-token-dispatcher-type
            --mlp-chunks-for-prefill
            """,
            "there are no Mamba layers": """
            --mamba-state-dim --mamba-head-dim --mamba-num-groups --mamba-num-heads --disable-mamba-mem-eff-path
            """,
            "it goes with --fine-grained-activation-offloading, which is refused": """
            --offload-modules --min-offloaded-tensor-size --delay-offload-until-cuda-graph
            --delta-offload-bytes-across-pp-ranks --activation-offload-fraction
            --fine-grained-offloading-max-inflight-offloads
            """,
        },
    ),
    Group(
        "network size",
        supported="""
        --encoder-num-layers --decoder-num-layers --group-query-attention --window-size --window-attn-skip-freq
        --max-position-embeddings --position-embedding-type --relative-attention-num-buckets
        --relative-attention-max-distance --use-rotary-position-embeddings --rotary-base --rotary-percent
        --rotary-seq-len-interpolation-factor --no-position-embedding --make-vocab-size-divisible-by --openai-gelu
        --squared-relu --swiglu --quick-geglu --onnx-safe --untie-embeddings-and-output-weights
        """,
        refused_for_t5={
            "the stages of a T5 do not look at it": """
            --yarn-original-max-position-embeddings --yarn-beta-fast --yarn-beta-slow
            --yarn-correction-range-round-to-int --no-yarn-correction-range-round-to-int --use-rope-scaling
            --rope-scaling-factor
            """,
            "it counts layers from the beginning of one stack, and a T5 has two": """
            --no-rope-freq
            """,
        },
        ignored={
            "it is for BERT": """
            --bert-no-binary-head
            """,
        },
    ),
    Group(
        "moe",
        refused={
            "auxiliary losses are averaged over micro-batches": """
            --num-experts
            """,
        },
        ignored={
            "it goes with --num-experts, which is refused": """
            --moe-layer-freq --moe-use-upcycling --moe-router-load-balancing-type --moe-aux-loss-coeff
            --moe-upcycling-granularity
            """,
        },
    ),
    Group(
        "mla",
        ignored={
            "it goes with a flag of the attention that is refused": """
            --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --rotary-scaling-factor
            --mscale --mscale-all-dim --cache-mla-latents --mla-down-proj-fusion
            """,
        },
    ),
    Group(
        "experimental_attention_variant",
        ignored={
            "it goes with a flag of the attention that is refused": """
            --linear-attention-freq
            """,
        },
    ),
    Group(
        "heterogeneous architecture",
        refused_in_entry_scripts={
            "the entry scripts build plain attention, MLP and norms": """
            --heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json
            """,
        },
    ),
    Group(
        "Transformer-Engine",
        refused={
            (
                "its weights and scales are kept from one iteration to the next by rules of Megatron's own "
                "schedules, its scales are agreed on in every pass, of which replicas have different numbers, and"
                " its kernels want lengths in multiples of 16 or 32"
            ): """
            --fp4-param-gather --fp8-param-gather --te-precision-config-file
            """,
        },
    ),
    Group(
        "experimental",
        supported="""
        --enable-experimental --use-precision-aware-optimizer --main-grads-dtype --main-params-dtype --exp-avg-dtype
        --exp-avg-sq-dtype
        """,
        refused={
            "it replaces the command line, which is what is checked; pass --dynapipe-config FILE": """
            --yaml-cfg
            """,
        },
        refused_in_entry_scripts={
            "the entry scripts build plain attention, MLP and norms": """
            --spec --hybrid-layer-pattern --hybrid-override-pattern
            """,
        },
        ignored={
            "it goes with FSDP, which is refused": """
            --megatron-fsdp-main-params-dtype --megatron-fsdp-main-grads-dtype --megatron-fsdp-grad-comm-dtype
            --megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer
            --fsdp-db-use-persist-buf-on-alloc-fail
            """,
        },
    ),
)
"""The groups, under the titles they have in Megatron's --help."""
