"""Training from a converted model: the steps of the test, each for processes of its own."""

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from tests.tools.conversion import models

CONVERTED = "converted #1"
"""A folder whose name a shell would not take as it is."""
SAMPLES = 16
"""Of the dataset, and of an iteration: each holds all of them, so that losses do not depend on their order."""


def convert_in(*, rank: int, world_size: int, folder: str, name: str, vocabulary: int) -> str:
    """A random model in `folder`/hf, converted into `folder`/CONVERTED; the text of its run file."""
    models._without_cuda()
    from megatron_dynapipe.tools.conversion.command import from_hugging_face

    config = models.configs()[name]
    config.vocab_size = vocabulary
    models.write(models.make(config), Path(folder) / "hf")
    return from_hugging_face(Path(folder) / "hf", Path(folder) / CONVERTED)[0].read_text()


def convert_back(*, rank: int, world_size: int, folder: str) -> str | None:
    """The last checkpoint of the run of CONVERTED in `folder`/back; the error, if it is refused."""
    models._without_cuda()
    from megatron_dynapipe.core.errors import ConfigError
    from megatron_dynapipe.tools.conversion.command import to_hugging_face

    try:
        to_hugging_face(Path(folder) / f"{CONVERTED}-run", Path(folder) / "back", Path(folder) / "hf")
    except ConfigError as error:
        return str(error)
    return None


def their_losses(
    *, rank: int, world_size: int, folder: str, data: str, rate: float, steps: int, eps: float | None
) -> list[float]:
    """Losses of a HuggingFace folder's model on all of a dataset's training samples: by Adam, or plain descent."""
    model, losses = _read(Path(folder)), []
    weights = model.parameters()
    optimizer = torch.optim.SGD(weights, lr=rate) if eps is None else torch.optim.Adam(weights, lr=rate, eps=eps)
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(_mean_loss(model, Path(data), train=True))
        optimizer.step()
    return losses


def their_loss(*, rank: int, world_size: int, folder: str, data: str) -> float:
    """Mean loss over all target tokens of a dataset's training samples, of a HuggingFace folder's model."""
    return _mean_loss(_read(Path(folder)), Path(data), train=False)


def _mean_loss(model: Any, data: Path, *, train: bool) -> float:
    """Of all target tokens; its gradient is added to the model's."""
    from megatron_dynapipe.data.indexed import IndexedReader
    from megatron_dynapipe.data.meta import read_meta

    meta, reader = read_meta(data), IndexedReader(data / "train")
    losses, tokens = torch.zeros(()), 0
    for sample in range(SAMPLES):
        given, wanted = (torch.from_numpy(part.astype("int64")) for part in reader[sample])
        with torch.set_grad_enabled(train):
            if model.config.model_type == "t5":
                shifted = torch.cat([torch.tensor([meta.bos_id]), wanted])
                labels = torch.cat([wanted, torch.tensor([meta.eos_id])])
                logits = model(input_ids=given[None], decoder_input_ids=shifted[None]).logits[0]
            else:
                labels = torch.cat([given, wanted])[1:]
                logits = model(torch.cat([given, wanted])[None]).logits[0, :-1]
            losses = losses + cross_entropy(logits, labels, reduction="sum")
        tokens += len(labels)
    if train:
        (losses / tokens).backward()
    return losses.item() / tokens


def _read(folder: Path) -> Any:
    """The model, every tensor of which `from_pretrained` has found; rotations are unset where CUDA is stubs."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForSeq2SeqLM if config.model_type == "t5" else AutoModelForCausalLM
    found, told = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(told[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    model = models.make(config)
    model.load_state_dict(found.state_dict())
    return model


def answers(*, rank: int, world_size: int, folder: str, prompts: list[list[int]], most: list[int]) -> list[list[int]]:
    """What a HuggingFace folder's model writes by itself after prompts of token ids: greedily, so many tokens at most,
    its end token included if it comes to one."""
    model = _read(Path(folder)).eval()
    written = []
    for prompt, length in zip(prompts, most, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
        written.append(ids[0, len(prompt) :].tolist())
    return written
