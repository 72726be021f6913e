"""Small models with random weights, batches for them, and losses: what the tests of this room divide and train."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, torch.Tensor]
VOCABULARY = 64


@dataclass(frozen=True)
class Case:
    """A model to train in pieces.

    `points` are those of four stages; two stages begin at the middle one. `batch(size, length, generator)` draws one.
    """

    build: Callable[[], nn.Module]
    points: Sequence[str]
    batch: Callable[[int, int, torch.Generator], Batch]
    loss: Callable[[Any, Mapping[str, torch.Tensor]], tuple[torch.Tensor, Any]]

    def points_of(self, stages: int) -> list[str]:
        return list(self.points) if stages == 4 else [self.points[1]]


def quiet() -> None:
    """Say nothing of tokens that tiny vocabularies lack."""
    import transformers

    transformers.logging.set_verbosity_error()


def of_transformers(kind: str, head: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Makes a model of the `transformers` library: of `kind`Config, with a head."""

    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(vocab_size=VOCABULARY, **sizes)
        return getattr(transformers, f"{kind}{head}")(config)

    return make


SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
GPT2 = {"n_positions": 64, "n_embd": 16, "n_layer": 4, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
BERT = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


def with_adapters() -> nn.Module:
    """GPT-2 with trained low-rank adapters in its last layers; everything else is frozen, tied embeddings too."""
    from peft import LoraConfig, get_peft_model

    model = of_transformers("GPT2", "LMHeadModel", **GPT2)()
    adapters = LoraConfig(r=2, target_modules=["c_attn", "c_fc"], layers_to_transform=[2, 3], fan_in_fan_out=True)
    return get_peft_model(model, adapters)


class Exchange(nn.Module):
    """One step of two paths that give each other their features: a dict in, a dict out."""

    def __init__(self, fine: int, coarse: int) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.fine = nn.Conv2d(fine, fine, 3, padding=1)
        self.coarse = nn.Conv2d(coarse, coarse, 3, padding=1)
        self.up = nn.Conv2d(coarse, fine, 1)
        self.down = nn.Conv2d(fine, coarse, 3, stride=2, padding=1)

    def forward(self, paths: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        fine, coarse = self.relu(paths["fine"]), self.relu(paths["coarse"])
        up = F.interpolate(self.up(coarse), size=fine.shape[-2:])
        return {"fine": self.fine(fine) + up, "coarse": self.coarse(coarse) + self.down(fine)}


class TwoPaths(nn.Module):
    """An image classifier of two resolutions; the first features, and a scalar, return at the end, past all stages.

    Its modules and weights have names of attributes of our parts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.stages = nn.ModuleList([Exchange(4, 6) for _ in range(4)])
        self.shrink = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.device = nn.Parameter(torch.zeros(4, 1, 1))
        self.inputs = nn.Linear(10, 5)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stem, scale = self.stem(image) * 0.5 + self.device, self.device.sum().cos()
        paths = {"fine": stem.clone(), "coarse": self.shrink(stem)}
        for step in self.stages:
            paths = step(paths)
        fine = paths["fine"].mean((2, 3)) + stem.mean((2, 3)) * self.device.flatten().cos() * scale
        features = torch.cat([fine, paths["coarse"].mean((2, 3))], dim=1)
        return self.inputs(features), features


def tokens(size: int, length: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (size, length), generator=generator)


def masked_tokens(size: int, length: int, generator: torch.Generator) -> Batch:
    """Rows of different lengths."""
    lengths = torch.randint(1, length + 1, (size,), generator=generator)
    mask = (torch.arange(length) < lengths[:, None]).long()
    mask[0] = 1
    ids = tokens(size, length, generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def t5_batch(size: int, length: int, generator: torch.Generator) -> Batch:
    batch = masked_tokens(size, length, generator)
    return {**batch, "labels": tokens(size, max(length // 2, 2), generator)}


def images(size: int, length: int, generator: torch.Generator) -> Batch:
    return {
        "image": torch.randn(size, 3, length, length, generator=generator),
        "labels": torch.randint(0, 5, (size,), generator=generator),
    }


def token_loss(output: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    loss = F.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)
    return loss, (batch["labels"] != -100).sum()


def class_loss(output: Any, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return F.cross_entropy(output[0], batch["labels"], reduction="sum"), len(batch["labels"])


CASES = {
    "gpt2": Case(of_transformers("GPT2", "LMHeadModel", **GPT2), ["h.1", "h.2", "h.3"], masked_tokens, token_loss),
    "bert": Case(
        of_transformers("Bert", "ForMaskedLM", **BERT),
        [f"bert.encoder.layer.{k}" for k in (1, 2, 3)],
        masked_tokens,
        token_loss,
    ),
    "t5": Case(
        of_transformers("T5", "ForConditionalGeneration", **T5),
        ["encoder.block.1", "decoder.block.0", "decoder.block.1"],
        t5_batch,
        token_loss,
    ),
    "llama": Case(
        of_transformers("Llama", "ForCausalLM", num_key_value_heads=1, **SMALL),
        [f"layers.{k}" for k in (1, 2, 3)],
        masked_tokens,
        token_loss,
    ),
    "adapters": Case(with_adapters, ["h.1", "h.2", "h.3"], masked_tokens, token_loss),
    "vision": Case(TwoPaths, [f"stages.{k}" for k in (1, 2, 3)], images, class_loss),
}


def build(name: str) -> nn.Module:
    """A case's model, always with the same weights; its parameters are spread out, so that none is zero."""
    quiet()
    torch.manual_seed(7)
    model = CASES[name].build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model
