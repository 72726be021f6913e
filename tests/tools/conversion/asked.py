"""What `convert` makes of models with more rows, with heads of their own, and in other types than their files; for
processes that have no other Megatron."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.tools.conversion import models
from tests.tools.conversion.models import VOCABULARY

Tensors = dict[str, torch.Tensor]


def source(folder: Path, name: str, change: Callable[[Tensors], Tensors] = dict, **settings: Any) -> Path:
    """A random model in HuggingFace's files, with other tensors and other fields of its configuration."""
    from safetensors.torch import load_file, save_file

    models.write(models.make(models.configs()[name]), folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    save_file(change(load_file(weights)), weights, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return folder


def there(place: Path, rows: int | None = None) -> tuple[list[str], Path]:
    """What is said of a folder that is converted, and the checkpoint's folder."""
    from megatron_dynapipe.tools.conversion.command import from_hugging_face

    said: list[str] = []
    converted = place.with_name(f"{place.name} converted")
    from_hugging_face(place, converted, vocabulary_rows=rows, said=said.append)
    return said, converted


def back(place: Path, rows: int | None = None, like: Path | None = None) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the configuration of a checkpoint that is converted back."""
    from safetensors.torch import load_file

    from megatron_dynapipe.tools.conversion.command import to_hugging_face

    target = place.with_name(f"{place.name} back {rows} {like is None}")
    to_hugging_face(place, target, like, vocabulary_rows=rows)
    return load_file(target / "model.safetensors"), json.loads((target / "config.json").read_text())


def refusal(call: Callable[[], object]) -> str:
    from megatron_dynapipe.core.errors import ConfigError

    try:
        return str(call())
    except ConfigError as error:
        return str(error)


def grown(*, rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Models with 30 rows more, there and back."""
    models._without_cuda()
    from safetensors.torch import load_file

    found = {}
    for name in ("llama", "gpt2", "t5-v1.1"):
        plain = source(Path(folder) / name, name)
        said, converted = there(plain, VOCABULARY + 30)
        all_rows, own_rows = back(converted), back(converted, VOCABULARY)
        as_before = load_file(plain / "model.safetensors")
        run_file = (converted / "model.yaml").read_text()
        found[name] = {
            "padded": "padded-vocab-size: 384" in run_file,
            "leaves layers open": "transformer-impl" not in run_file,  # a GPU's run takes Transformer Engine's
            "said": said,
            "sizes": [config["vocab_size"] for _, config in (all_rows, own_rows)],
            "as before": all(torch.equal(own_rows[0][key], as_before[key]) for key in own_rows[0]),
            "means": [
                (tensor[VOCABULARY:] - as_before[key].mean(0)).abs().max().item()
                for key, tensor in all_rows[0].items()
                if len(tensor) == VOCABULARY + 30
            ],
        }
    return found


def added_tokens(*, rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """A run whose data had 10 tokens more than its model, converted back."""
    models._without_cuda()
    import msgspec

    from megatron_dynapipe.megatron.entry.resume_record import NAME, ResumeRecord
    from megatron_dynapipe.megatron.flags.checkpoints import RELEASE

    plain = source(Path(folder) / "llama", "llama")
    _, converted = there(plain, VOCABULARY + 30)
    model = {"vocabulary_size": str(VOCABULARY + 10)}
    record = ResumeRecord(model=model, tokenizer="", dataset={}, settings={}, began=(0, 0))
    (converted / RELEASE / NAME).write_bytes(msgspec.json.encode(record))
    return {
        "unasked": refusal(lambda: back(converted, None, plain)),
        "kept": back(converted, VOCABULARY + 10, plain)[1]["vocab_size"],
        "left out": back(converted, VOCABULARY, plain)[1]["vocab_size"],
        "fewer": refusal(lambda: there(plain, VOCABULARY - 1)),
    }


def heads(*, rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Models whose configurations tie a head that their files have."""
    models._without_cuda()
    torch.manual_seed(1)
    head = torch.randn(VOCABULARY, 64)
    found: dict[str, Any] = {}
    for name in ("qwen2", "gpt2"):
        own = source(Path(folder) / name, name, lambda tensors: tensors | {"lm_head.weight": head})
        said, converted = there(own)
        results = [back(converted), back(converted, None, own)]
        same = [torch.equal(tensors["lm_head.weight"], head) for tensors, _ in results]
        found[name] = said, same, [config["tie_word_embeddings"] for _, config in results]

    def with_equal(tensors: Tensors) -> Tensors:
        return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}

    said, converted = there(source(Path(folder) / "equal", "qwen2", with_equal))
    found["equal"] = said, "lm_head.weight" in back(converted)[0]
    return found


def quantized(*, rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """What the configuration says of a result that is made like a folder of quantized weights."""
    models._without_cuda()
    place = Path(folder)
    plain = source(place / "llama", "llama")
    _, converted = there(plain)
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    like = source(place / "like", "llama", dtype="bfloat16", **fp8)
    tensors, config = back(converted, None, like)
    plain_config = back(converted)[1]
    return {
        "types": sorted({str(tensor.dtype) for tensor in tensors.values()}),
        "said": {name: config.get(name) for name in ("dtype", "quantization_config")},
        "unchanged": plain_config == json.loads((plain / "config.json").read_text()),
    }


def types(*, rank: int, world_size: int, folder: str) -> dict[str, list[str]]:
    """What is said of files in one type and a configuration in another."""
    models._without_cuda()

    def halved(tensors: Tensors) -> Tensors:
        return {name: tensor.bfloat16() for name, tensor in tensors.items()}

    place = Path(folder)
    return {
        "rounded": there(source(place / "rounded", "llama", dtype="bfloat16"))[0],
        "half": there(source(place / "half", "llama", halved, dtype="bfloat16"))[0],
        "widened": there(source(place / "widened", "llama", halved, dtype="float32"))[0],
    }
