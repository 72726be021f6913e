"""The tokenizer of a run: read when it is asked for more than a size, at once if it is not the dataset's."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_dynapipe.megatron.hooks import vocabulary
from megatron_dynapipe.megatron.hooks.vocabulary import UnreadTokenizer


def namespace(data, **others: Any) -> SimpleNamespace:
    arguments = {
        "dynapipe_data": data,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(data / "tokenizer"),
        "special_tokens": None,
        "padded_vocab_size": None,
        "make_vocab_size_divisible_by": 128,
        "tensor_model_parallel_size": 3,
    }
    return SimpleNamespace(**arguments | others)


def test_a_tokenizer_is_read_once_and_when_it_is_used():
    read = []

    def tokenizer() -> Any:
        read.append("tokenizer")
        return SimpleNamespace(eod=3, vocab_size=7)

    unread = UnreadTokenizer(7, tokenizer)
    assert copy.copy(unread).vocab_size == 7 and not read
    assert (unread.eod, unread.eod) == (3, 3) and read == ["tokenizer"]
    with pytest.raises(AttributeError, match="no_such"):
        unread.no_such  # noqa: B018  # Megatron asks with hasattr


@pytest.mark.parametrize(
    ("others", "built"),
    [
        pytest.param({}, [], id="the dataset's"),
        pytest.param({"pad_vocab_size": True}, [], id="as 0.19 says it"),
        pytest.param({"tokenizer_type": "NullTokenizer"}, ["built"], id="another kind"),
        pytest.param({"tokenizer_model": "elsewhere"}, ["built"], id="another folder's"),
        pytest.param({"special_tokens": ["<x>"]}, ["built"], id="of more tokens"),
        pytest.param({"tokenizer_metadata": "file"}, ["built"], id="made otherwise, in 0.18"),
        pytest.param({"dynapipe_data": None}, ["built"], id="of no dataset"),
    ],
)
def test_what_is_read_at_once(data, others, built):
    calls = []
    args = namespace(data, **others)
    (row,) = vocabulary.TABLE
    tokenizer = row.make(lambda args: calls.append("built"))(args)
    assert calls == built
    if not built:
        assert (tokenizer.vocab_size, args.padded_vocab_size) == (512, 768)


def test_a_size_that_is_not_to_be_padded_stays(data):
    args = namespace(data, pad_vocab_size=False)
    (row,) = vocabulary.TABLE
    row.make(lambda args: None)(args)
    assert args.padded_vocab_size is None
