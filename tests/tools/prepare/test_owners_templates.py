"""The chat templates of models' owners, as the wheel of trl has them, with rows of every kind.

Ids are those of transformers for the row in one of the forms that templates read; every answer is learned whole, or its
row is refused with a reason; of what is given nothing is lost without its line. The wheel is not imported:

    pip install --no-deps trl==1.16.0
    python -m pytest tests/tools/prepare/test_owners_templates.py                   # every day: 15 templates
    python -m pytest tests/tools/prepare/test_owners_templates.py -m "slow or not slow"      # all of them
"""

import importlib.util
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_dynapipe.tools.mixture.blocks import Block
from megatron_dynapipe.tools.mixture.spec import Mixture, TaskSpec
from megatron_dynapipe.tools.prepare import BadRows, PrepareSettings
from megatron_dynapipe.tools.prepare.encode import EncodedRows, Encoder
from megatron_dynapipe.tools.prepare.rendering import DATE
from megatron_dynapipe.tools.prepare.tokenizer import load_tokenizer
from tests.helpers.chat_models import saved
from tests.tools.prepare.test_learned_tokens import samples

_WHEEL = importlib.util.find_spec("trl")
FOLDER = Path(_WHEEL.origin).with_name("chat_templates") if _WHEEL and _WHEEL.origin else None
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja")) if FOLDER else []
EVERY_DAY = {
    *("cohere2", "deepseek_r1_distill", "deepseekv3", "gemma3", "gemma4_v5", "glm4moe", "gptoss", "idefics3"),
    *("lfm2_2_5", "llama3_1", "nemotron_3_nano", "phi3_5_training", "qwen2_5", "qwen3_8", "qwen3_training"),
}
CONTROL = re.compile(r"<\|[\w ]+\|?>|<｜[\w▁]+｜>|</?s>|<(?:start|end)_of_\w+>|\[/?INST\]|<\|\"\|>|<[a-z_]+\|>")
"""Tokens that templates write between turns: a tokenizer has them as special ones."""

USER = {"role": "user", "content": "How warm is it in Oslo today?"}
ANSWER = {"role": "assistant", "content": "Four degrees below zero."}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "c12345678", "content": "minus four"}
SECOND = {"role": "user", "content": "And in Rome?"}, {"role": "assistant", "content": "Twenty degrees."}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "which"}},
    "required": ["city"],
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Celsius.", "parameters": PARAMETERS}}]
THOUGHT = "<think>\nWinter, so it is cold.\n</think>\n\n"


def calls(*arguments: Any, content: str | None = None) -> dict[str, Any]:
    made = [
        {"id": f"c1234567{at}", "type": "function", "function": {"name": "get_weather", "arguments": one}}
        for at, one in enumerate(arguments, start=8)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def parts(message: dict[str, Any]) -> dict[str, Any]:
    first, rest = message["content"][:9], message["content"][9:]
    return message | {"content": [{"type": "text", "text": first}, {"type": "text", "text": rest}]}


OSLO, ROME = {"city": "Oslo"}, {"city": "Rome"}
ROWS: dict[str, list[dict[str, Any]]] = {
    "plain": [USER, ANSWER],
    "several turns": [USER, ANSWER, *SECOND],
    "short": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "e"}],
    "a system's message": [{"role": "system", "content": "Be kind and brief."}, USER, ANSWER],
    "a call": [USER, calls(OSLO), RESULT, ANSWER],
    "a call as text": [USER, calls(json.dumps(OSLO)), RESULT, ANSWER],
    "a call alone": [USER, calls(json.dumps(OSLO), content="")],
    "parallel calls": [
        USER,
        calls(OSLO, ROME),
        RESULT,
        RESULT | {"tool_call_id": "c12345679", "content": "25"},
        ANSWER,
    ],
    "a thought": [USER, ANSWER | {"reasoning_content": "Winter, so it is cold."}],
    "a thought in its content": [USER, ANSWER | {"content": THOUGHT + ANSWER["content"]}],
    "thoughts of several turns": [USER, ANSWER | {"content": THOUGHT + ANSWER["content"]}, *SECOND],
    "parts": [parts(USER), parts(ANSWER)],
    "an empty answer": [USER, ANSWER | {"content": ""}],
    "a developer": [{"role": "developer", "content": "Be kind and brief."}, USER, ANSWER],
    "other names of roles": [USER | {"role": "human"}, ANSWER | {"role": "gpt"}],
    "nulls": [USER | {"name": None, "tool_calls": None}, ANSWER | {"reasoning_content": None, "tool_calls": None}],
}
NAMES = {"human": "user", "gpt": "assistant"}


def tokenizer_of(template: str) -> Any:
    special = ["<pad>", "<BOS>", "<EOS>", *sorted(set(CONTROL.findall(template)))]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    size = len(special) + len(letters) + 20
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    bpe.train_from_iterator(["the quick brown fox user assistant system \n\n \n"] * 3, trainer)
    names = {"pad_token": "<pad>", "bos_token": "<BOS>", "eos_token": "<EOS>"}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **names, chat_template=template)


def variants(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The row in every form that a template may read."""
    there = [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        | {"role": NAMES.get(message["role"], message["role"])}
        for message in messages
    ]
    for form in itertools.product(("as it is", "joined", "wrapped"), (0, 1, 2), (0, 1), (0, 1), ("", None, "none")):
        yield [_variant(message, *form) for message in there]


def _variant(
    message: dict[str, Any], content: str, arguments: int, moves: int, system: int, blank: Any
) -> dict[str, Any]:
    made = dict(message)
    if system and made["role"] == "developer":
        made["role"] = "system"
    if isinstance(made["content"], list) and content == "joined":
        made["content"] = "".join(part["text"] for part in made["content"])
    if moves and made["role"] == "assistant" and isinstance(made["content"], str) and "</think>" in made["content"]:
        thought, _, made["content"] = made["content"].partition("</think>\n\n")
        made["reasoning_content"] = thought.removeprefix("<think>").strip("\n")
    if not made["content"]:
        made["content"] = blank
        if blank == "none":
            del made["content"]
    elif isinstance(made["content"], str) and content == "wrapped":
        made["content"] = [{"type": "text", "text": made["content"]}]
    if arguments and "tool_calls" in made:
        made["tool_calls"] = [call | {"function": _call(call["function"], arguments)} for call in made["tool_calls"]]
    return made


def _call(function: dict[str, Any], form: int) -> dict[str, Any]:
    given = function["arguments"]
    value = json.loads(given) if isinstance(given, str) else given
    return function | {"arguments": value if form == 1 else json.dumps(value, separators=(",", ":"))}


def plain(text: str) -> str:
    return "".join(text.split())


def said(message: dict[str, Any]) -> list[str]:
    """What a message says, in pieces."""
    content = message["content"] or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    texts = [piece for text in texts for piece in re.split("</?think>", text)]
    texts.append(message.get("reasoning_content") or "")
    for call in message.get("tool_calls") or []:
        texts += ["get_weather", _call(call["function"], 1)["arguments"]["city"]]
    return [plain(text) for text in texts if text.strip()]


_PARAMETERS = [pytest.param(name, marks=[] if name in EVERY_DAY else [pytest.mark.slow]) for name in TEMPLATES]


@pytest.fixture(scope="module", params=_PARAMETERS or ["none"])
def owner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Encoder]:
    """A tokenizer with the template of an owner, and what encodes with it."""
    if FOLDER is None:
        pytest.skip("needs the templates in trl's wheel: pip install --no-deps trl==1.16.0")
    tokenizer = tokenizer_of((FOLDER / f"{request.param}.jinja").read_text(encoding="utf-8"))
    folder = saved(tmp_path_factory.mktemp("owner"), tokenizer)
    formats = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
    tokenizer.chat_template = formats.sub(lambda form: f"'{DATE.strftime(form[2])}'", tokenizer.chat_template)
    settings = PrepareSettings(source="test", bad_rows=BadRows.SKIP, skip_empty=True)
    spec = TaskSpec(name="n", source="x", messages="messages")
    return tokenizer, Encoder(load_tokenizer(folder), Mixture(tasks=(spec,)), settings)


@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_every_kind(owner: tuple[Any, Encoder], kind: str) -> None:
    tokenizer, encode = owner
    messages = ROWS[kind]
    row = {"messages": messages} | ({"tools": TOOLS} if "call" in kind else {})
    block = encode(Block(file="rows.jsonl", unit="line", first=1, lines=json.dumps(row).encode(), done=0), 0)
    rendered = dict(_rendered(tokenizer, row))
    found = [sample for sample in samples(block) if sample[0]]
    if not found:
        _check_refusal(block, messages, rendered, dict(_rendered(tokenizer, row | {"messages": _bare(messages)})))
        return
    ids, _ = found[-1]
    wholes = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]
    assert any(ids == whole[: len(ids)] for whole in wholes), tokenizer.decode(ids)
    answers = [message for message in messages if NAMES.get(message["role"], message["role"]) == "assistant"]
    learned = "\n".join(_learned(tokenizer, *sample) for sample in found)
    at = 0
    for piece in (piece for answer in answers for piece in _in_any_order(answer, plain(learned))):
        assert piece in plain(learned), piece
        at += 1
    assert at
    text = plain(tokenizer.decode(ids))
    for message in messages:
        for piece in said(message):
            is_given = message not in answers
            assert not is_given or piece not in plain(learned)
            assert piece in text or message in answers or any(message["role"] in name for name in block.not_written)
    assert plain(json.dumps(json.dumps(OSLO))) not in text and text.count("</think>") <= max(1, 2 * len(answers))


def _in_any_order(answer: dict[str, Any], learned: str) -> list[str]:
    """The pieces of an answer; a template may write calls and content in any order."""
    return sorted(said(answer), key=learned.find)


def _learned(tokenizer: Any, ids: list[int], learned: list[int]) -> str:
    return str(tokenizer.decode([token for token, counts in zip(ids, learned, strict=True) if counts]))


def _rendered(tokenizer: Any, row: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """What transformers writes of the row in each form that the template does not refuse.

    `apply_chat_template` leaves out nulls, also the content of a call that DeepSeek's templates ask for.
    """
    for messages in variants(row["messages"]):
        try:
            if any(message.get("content", "") is None for message in messages):
                ((text,), _) = render_jinja_template(
                    [messages], row.get("tools"), None, tokenizer.chat_template, **tokenizer.special_tokens_map
                )
            else:
                text = tokenizer.apply_chat_template(messages, tools=row.get("tools"), tokenize=False)
        except Exception:  # noqa: BLE001  # a template refuses by any error
            continue
        yield text, messages


def _bare(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without thoughts and calls of their own."""
    extra = ("tool_calls", "reasoning_content")
    return [{key: value for key, value in message.items() if key not in extra} for message in messages]


def _check_refusal(
    block: EncodedRows, messages: list[dict[str, Any]], rendered: dict[str, Any], bare: dict[str, Any]
) -> None:
    """A row without a sample has a reason: an empty answer, or no form in which its answers are written once."""
    assert len(block.samples) == 1
    answers = [message for message in messages if message["role"] == "assistant"]
    if not all(said(answer) for answer in answers):
        return
    assert block.errors
    for text in rendered:
        pieces = [piece for answer in answers for piece in said(answer)]
        is_bare = bare and messages != _bare(messages) and text in bare
        is_twice = any(plain(json.dumps(json.dumps(place))) in plain(text) for place in (OSLO, ROME))
        # A thought is told from the thoughts that a template begins by itself; Python's text of a call is none.
        is_python = any(plain(repr(place)) in plain(text) for place in (OSLO, ROME))
        assert (
            is_bare or is_twice or is_python or any(plain(text).count(piece) < pieces.count(piece) for piece in pieces)
        ), text
