"""HuggingFace models as checkpoints of Megatron and back: GPT-2; LLaMA, Mistral and Qwen;
Mixtral and Qwen3-MoE; T5 v1.1 and mT5."""
