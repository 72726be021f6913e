"""What a row says is what is taught: nothing of it is lost before its template or inside it without a word."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.tools.mixture.sources import rows_source
from megatron_dynapipe.tools.mixture.spec import InputAndTarget, Mixture, TaskSpec, read_mixture
from megatron_dynapipe.tools.prepare import BadRows, PrepareSettings, prepare_mixture
from tests.helpers.chat_models import chat_tokenizer, saved
from tests.tools.prepare.test_learned_tokens import dialogue, encoded, shown

PROMPT = "{% if add_generation_prompt %}<|b|>assistant\n{% endif %}"
KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'tool'] %}<|b|>{{ m.role }}\n"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<|tool|>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endif %}{% endfor %}" + PROMPT
)
"""Writes the roles that it knows, and calls' arguments as JSON."""
TEXT_CALLS = KNOWN_ROLES.replace("c.function.arguments | tojson", "'' + c.function.arguments")
ITEMS = KNOWN_ROLES.replace(
    "{{ c.function.arguments | tojson }}", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
)
PYTHON = KNOWN_ROLES.replace("c.function.arguments | tojson", "c.function.arguments")
DROPS_THOUGHTS = "{% for m in messages %}<|b|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
DROPS_THOUGHTS += PROMPT
CHANNELS = (
    "{% for m in messages %}<|b|>{{ m.role }}\n{% if m.reasoning_content %}<|a|>{{ m.reasoning_content }}<|c|>"
    "{% endif %}{{ m.content }}<|end|>{% endfor %}" + PROMPT
)
THINKS = (
    "{% for m in messages %}<|b|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content }}\n"
    "</think>\n\n{% endif %}{{ m.content }}<|end|>{% endfor %}" + PROMPT
)
PARTS = (
    "{% for m in messages %}<|b|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}<|end|>{% endfor %}" + PROMPT
)
USER = {"role": "user", "content": "quick?"}
HEAD = "<|b|>user\nquick?<|end|><|b|>assistant\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("tokenizer"), chat_tokenizer())


def call(arguments: Any) -> dict[str, Any]:
    calls = [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def chat(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages)} | more


THOUGHT = {"role": "assistant", "content": "<think>\nover the dog\n</think>\n\nlazy"}
WRITTEN = '[<|tool|>weather {"city": "Oslo"}<|end|>]'


@pytest.mark.parametrize(
    ("template", "row", "task", "expected"),
    [
        pytest.param(KNOWN_ROLES, chat(USER, call('{"city": "Oslo"}')), {}, HEAD + WRITTEN, id="arguments as text"),
        pytest.param(KNOWN_ROLES, chat(USER, call({"city": "Oslo"})), {}, HEAD + WRITTEN, id="arguments as an object"),
        pytest.param(
            TEXT_CALLS, chat(USER, call('{"city": "Oslo"}')), {}, HEAD + WRITTEN, id="text where it is wanted"
        ),
        pytest.param(
            TEXT_CALLS,
            chat(USER, call({"city": "Oslo"})),
            {},
            HEAD + WRITTEN.replace(": ", ":"),
            id="an object as text",
        ),
        pytest.param(
            ITEMS, chat(USER, call('{"city": "Oslo"}')), {}, HEAD + "[<|tool|>weather city=Oslo<|end|>]", id="items"
        ),
        pytest.param(
            PYTHON,
            chat(USER, call({"city": "Oslo"})),
            {},
            HEAD + WRITTEN.replace(": ", ":"),
            id="never Python's own text",
        ),
        pytest.param(KNOWN_ROLES, chat(USER, call("{}")), {}, HEAD + "[<|tool|>weather {}<|end|>]", id="no arguments"),
        pytest.param(
            KNOWN_ROLES,
            chat(USER, {"role": "function_call", "content": '{"name": "weather", "arguments": {"city": "Oslo"}}'}),
            {},
            HEAD + WRITTEN,
            id="a call as its own turn",
        ),
        pytest.param(
            KNOWN_ROLES,
            chat(
                USER,
                {
                    "role": "assistant",
                    "content": "",
                    "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                },
            ),
            {},
            HEAD + WRITTEN,
            id="OpenAI's old call",
        ),
        pytest.param(
            KNOWN_ROLES,
            chat(
                {"role": "human", "content": "quick?"},
                {"role": "function", "content": "fox"},
                {"role": "GPT", "content": "lazy"},
            ),
            {},
            "<|b|>user\nquick?<|end|><|b|>tool\nfox<|end|><|b|>assistant\n[lazy<|end|>]",
            id="names of roles",
        ),
        pytest.param(
            KNOWN_ROLES,
            chat({"role": "developer", "content": "Be brief."}, USER, {"role": "assistant", "content": "lazy"}),
            {},
            "<|b|>system\nBe brief.<|end|>" + HEAD + "[lazy<|end|>]",
            id="a developer",
        ),
        pytest.param(
            KNOWN_ROLES,
            chat({"role": "critic", "content": "quick?"}, {"role": "assistant", "content": "lazy"}),
            {"roles": {"critic": "user"}},
            HEAD + "[lazy<|end|>]",
            id="a role of the task",
        ),
        *(
            pytest.param(
                KNOWN_ROLES,
                dialogue("quick?", "lazy") | {column: "Be brief."},
                task,
                "<|b|>system\nBe brief.<|end|>" + HEAD + "[lazy<|end|>]",
                id=f"a system's message as {column}",
            )
            for column, task in (("system", {}), ("system_prompt", {}), ("persona", {"system": "persona"}))
        ),
        pytest.param(
            CHANNELS, chat(USER, THOUGHT), {}, HEAD + "[<|a|>over the dog<|c|>lazy<|end|>]", id="a thought is moved"
        ),
        pytest.param(
            THINKS,
            chat(USER, THOUGHT),
            {},
            HEAD + "[<think>\nover the dog\n</think>\n\nlazy<|end|>]",
            id="one thought, not two",
        ),
        pytest.param(KNOWN_ROLES, chat(USER, THOUGHT), {}, HEAD + f"[{THOUGHT['content']}<|end|>]", id="tags as text"),
        pytest.param(
            PARTS,
            chat(
                {"role": "user", "content": [{"type": "text", "text": "quick"}, {"type": "text", "text": "?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "lazy"}]},
            ),
            {},
            HEAD + "[lazy<|end|>]",
            id="parts as they came",
        ),
        pytest.param(PARTS, dialogue("quick?", "lazy"), {}, HEAD + "[lazy<|end|>]", id="texts as parts"),
        pytest.param(
            "{{ mood | default('calm') }}" + KNOWN_ROLES,
            dialogue("quick?", "lazy"),
            {"template_arguments": {"mood": "glad"}},
            "glad" + HEAD + "[lazy<|end|>]",
            id="the task's variables",
        ),
        pytest.param(
            "{{ mood | default('calm') }}" + KNOWN_ROLES,
            dialogue("quick?", "lazy") | {"chat_template_kwargs": {"mood": "sad"}},
            {"template_arguments": {"mood": "glad"}},
            "sad" + HEAD + "[lazy<|end|>]",
            id="a row's variables",
        ),
        pytest.param(
            "{{ mood | default('calm') }}" + KNOWN_ROLES,
            dialogue("quick?", "lazy") | {"mood": "sad"},
            {},
            "sad" + HEAD + "[lazy<|end|>]",
            id="a column that is a variable",
        ),
        pytest.param(
            KNOWN_ROLES,
            {
                "prompt": [USER, {"role": "assistant", "content": "fox"}, USER],
                "completion": [{"role": "assistant", "content": "lazy"}],
            },
            {"messages": ("prompt", "completion")},
            HEAD + "fox<|end|>" + HEAD + "[lazy<|end|>]",
            id="prompt and completion",
        ),
        *(
            pytest.param(
                KNOWN_ROLES,
                chat(
                    USER,
                    {"role": "assistant", "content": "no", key: value},
                    USER,
                    {"role": "assistant", "content": "yes"},
                ),
                {},
                HEAD + "no<|end|>" + HEAD + "[yes<|end|>]",
                id=f"{key}: {value}",
            )
            for key, value in (("training", False), ("loss_scale", 0), ("masked", True), ("train_on_turn", False))
        ),
        pytest.param(
            KNOWN_ROLES,
            dialogue("quick?", "\n\nlazy"),
            {"strip_newlines": True},
            HEAD + "[lazy<|end|>]",
            id="newlines cut off",
        ),
        pytest.param(
            KNOWN_ROLES,
            {"messages": [json.dumps(USER), json.dumps({"role": "assistant", "content": "lazy"})]},
            {},
            HEAD + "[lazy<|end|>]",
            id="a list of JSON texts",
        ),
    ],
)
def test_rows_are_taught_as_they_are_meant(
    folder: Path, template: str, row: dict[str, Any], task: dict[str, Any], expected: str
) -> None:
    block = encoded(folder, [row], template=template, **task)
    assert shown(folder, block) == [expected]
    unread = {"rows with the column 'id'", "messages with 'id'"}
    assert not block.not_written.keys() - unread


@pytest.mark.parametrize(
    ("template", "row", "said"),
    [
        (
            DROPS_THOUGHTS,
            chat(USER, THOUGHT),
            "message 1: expected a chat template that writes the answer's content, which",
        ),
        (
            DROPS_THOUGHTS,
            chat(USER, call({"city": "Oslo"}) | {"content": ""}),
            "writes the answer's tool_calls, which is",
        ),
        (
            KNOWN_ROLES,
            chat(USER, {"role": "assistant", "content": "lazy", "reasoning_content": "dog"}),
            "message 1: expected a chat template that writes the answer's reasoning_content",
        ),
        (
            KNOWN_ROLES,
            chat(USER, {"role": "critic", "content": "e"}, {"role": "assistant", "content": "lazy"}),
            "message 1: expected a role that the chat template writes, got 'critic'",
        ),
        (THINKS, chat(USER, THOUGHT | {"reasoning_content": "dog"}), "message 1: expected an answer with one thought"),
        (
            KNOWN_ROLES,
            chat({"role": "system", "content": "a"}, USER, {"role": "assistant", "content": "b"}, system="c"),
            "expected one system's message",
        ),
        (KNOWN_ROLES, chat({"from": "critic", "value": "q"}), "`roles:` names others"),
        (KNOWN_ROLES, dialogue("quick?", ""), "expected every target to have at least 1 token, this one has 0"),
        (KNOWN_ROLES, dialogue("quick?", " \n", "quick?", "lazy"), "expected every target to have at least 1 token"),
        (
            KNOWN_ROLES,
            dialogue("a", "b") | {"chat_template_kwargs": 3},
            "expected chat_template_kwargs that are an object",
        ),
        (KNOWN_ROLES, dialogue("a", "b") | {"system": 3}, "expected a system's message that is text, got 3"),
    ],
)
def test_what_cannot_be_taught_whole_is_an_error_with_its_line(
    folder: Path, template: str, row: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError) as caught:
        encoded(folder, [dialogue("q", "a"), row], template=template)
    assert "rows.jsonl, line 2" in caught.value.message and said in caught.value.message
    settings = PrepareSettings(source="test", tokenizer=folder, bad_rows=BadRows.SKIP, skip_empty=True)
    spec = TaskSpec(name="n", source="x", messages="messages", valid=0.0, test=0.0)
    mixture = Mixture(tasks=(spec,), chat_template=template)
    meta, _ = prepare_mixture(mixture, [rows_source([dialogue("q", "a"), row])], folder.parent / "data", settings)
    assert meta.read == {"n": 2} and sum(meta.skipped.values()) == 1


@pytest.mark.parametrize(
    ("template", "row", "counts"),
    [
        (
            KNOWN_ROLES.replace("'system', ", ""),
            chat({"role": "system", "content": "e"}, *dialogue("quick", "ok")["messages"]),
            {"messages of role 'system'": 1},
        ),
        (
            KNOWN_ROLES,
            chat(*dialogue("q", "a")["messages"], {"role": "user", "content": "r", "mood": 1}, id=7, source="web"),
            {"messages with 'mood'": 1, "rows with the column 'id'": 1, "rows with the column 'source'": 1},
        ),
        (
            DROPS_THOUGHTS,
            chat(USER, THOUGHT | {"weight": 0}, USER, {"role": "assistant", "content": "yes"}),
            {"messages of role 'assistant'": 1},
        ),
        (
            KNOWN_ROLES + "{# tools #}",
            dialogue("q", "a") | {"tools": [{"type": "function", "function": {"name": "weather"}}]},
            {"conversations with 'tools'": 1},
        ),
        (KNOWN_ROLES, dialogue("q", "a") | {"functions": [{"name": "weather"}]}, {"conversations with 'tools'": 1}),
    ],
)
def test_what_is_given_and_not_written_is_counted(
    folder: Path, template: str, row: dict[str, Any], counts: dict[str, int]
) -> None:
    """Also a text so short that the template's own words have it."""
    assert encoded(folder, [row, dialogue("q", "a")], template=template).not_written == counts


@pytest.mark.parametrize(
    ("template", "row", "said"),
    [
        (
            "{{ mood | default('calm') }}" + KNOWN_ROLES,
            dialogue("q", "a"),
            "chat template's own default stands for mood",
        ),
        (KNOWN_ROLES, dialogue("say <|end|> twice", "a"), "messages whose text has control tokens"),
        (KNOWN_ROLES.replace("<|b|>{{ m.role }}\n", "user "), dialogue("q", "fox"), None),
    ],
)
def test_what_is_said_of_a_row(folder: Path, template: str, row: dict[str, Any], said: str | None) -> None:
    remarks = encoded(folder, [row], template=template).remarks
    assert [count for remark, count in remarks.items() if said is not None and said in remark] == [1] * (
        said is not None
    )


def test_a_token_that_spans_header_and_answer_is_said(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    tokenizer.backend_tokenizer.add_tokens(["\n\n\n"])
    folder = saved(tmp_path, tokenizer)
    remarks = encoded(folder, [dialogue("q", "\n\nfox"), dialogue("q", "fox")], template=KNOWN_ROLES).remarks
    assert [count for remark, count in remarks.items() if "whose first token also holds" in remark] == [1]


def test_blanks_after_a_stop_token_are_no_missing_stop(folder: Path) -> None:
    marked = "{% for m in messages %}<|b|>{{ m.role }}\n{% generation %}{{ m.content }}<|end|>\n\n{% endgeneration %}"
    block = encoded(folder, [dialogue("q", "fox")], template=marked + "{% endfor %}")
    assert not [remark for remark in block.remarks if "no special token" in remark]


def test_a_text_of_one_token_is_empty(folder: Path) -> None:
    """With its end token alone to be learned, a T5's target would be empty; a last piece never has so little."""
    with pytest.raises(DataError, match="expected every target to have at least 1 token"):
        encoded(folder, [{"t": "x"}], messages=None, text="t")
    block = encoded(folder, [{"t": "jkzvx"}], messages=None, text="t", length=4)
    (row,) = block.samples
    assert [row[name] for name in ("input", "target", "input_end", "target_end")] == [1, 5, 0, 1]


def test_a_chat_template_is_a_text_or_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mixture.yaml").write_text(
        "chat_template: absent.jinja\ntasks:\n  - {name: n, source: x, messages: m}\n"
    )
    assert read_mixture(tmp_path / "mixture.yaml").chat_template == "absent.jinja"
    with pytest.raises(
        DataError, match="expected chat_template to be a Jinja template, or a file with one, got 'absent"
    ):
        encoded(folder, [dialogue("q", "a")], template="absent.jinja")


def test_another_recipe_makes_a_dataset_again_and_says_so(folder: Path, tmp_path: Path) -> None:
    rows = [rows_source([{"q": str(at), "a": "a"} for at in range(9)])]
    settings = PrepareSettings(source="test", tokenizer=folder)
    for template in ("{{ q }}\n ||| {{ a }}", InputAndTarget(input="{{ q }}\n", target="{{ a }}")):
        mixture = Mixture(tasks=(TaskSpec(name="n", source="x", template=template),))
        notes = prepare_mixture(mixture, rows, tmp_path / "data", settings)[1]
        is_kept = any("task n: newlines at ||| are left out" in note for note in notes)
        assert is_kept is isinstance(template, str)
    assert any("replaced another dataset" in note for note in notes)
