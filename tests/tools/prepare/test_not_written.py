"""What a template does not write is counted, in all places that say so; random templates and conversations agree."""

import json
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st

from megatron_dynapipe.cli.main import main as cli
from megatron_dynapipe.core.errors import DataError
from megatron_dynapipe.core.units import ModelFamily
from megatron_dynapipe.data.meta import read_meta
from megatron_dynapipe.tools.mixture.sources import rows_source
from megatron_dynapipe.tools.mixture.spec import Mixture, TaskSpec
from megatron_dynapipe.tools.prepare import PrepareSettings, prepare_mixture
from megatron_dynapipe.tools.taught import taught_samples
from tests.helpers.chat_models import chat_tokenizer, saved
from tests.helpers.examples import examples
from tests.tools.prepare.test_learned_tokens import dialogue, encoded, shown
from tests.tools.prepare.test_lost_text import KNOWN_ROLES, chat


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("tokenizer"), chat_tokenizer())


def test_counts_are_in_notes_manifest_statistics_and_samples(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Of conversations and of pairs: a column that a template names and that is empty in most rows."""
    chats = [chat({"role": "system", "content": f"be {at}"}, *dialogue("q", f"a {at}")["messages"]) for at in range(3)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*chats, dialogue("q", "b")]))
    pairs = [{"q": f"q {at}", "a": "a", "hint": "" if at else "h"} for at in range(3)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (tmp_path / "template.jinja").write_text(KNOWN_ROLES.replace("'system', ", ""))
    (tmp_path / "mixture.yaml").write_text(
        "chat_template: template.jinja\ntasks:\n  - {name: c, source: chats.jsonl, messages: messages}\n"
        '  - {name: p, source: pairs.jsonl, template: "{{ hint }}{{ q }}|||{{ a }}"}\n'
    )
    data = str(tmp_path / "data")
    words = ["--tokenizer", str(folder), "--valid-fraction", "0", "--test-fraction", "0", "--output", data]
    assert cli(["data", "prepare", "--mixture", str(tmp_path / "mixture.yaml"), *words]) == 0
    said = capsys.readouterr().err.splitlines()
    counts = {"messages of role 'system'": 3, "rows of p in which 'hint' is empty": 2}
    for name, count in counts.items():
        assert f"{name}, which the template does not write: {count}" in said
    assert read_meta(tmp_path / "data").not_written == counts
    assert cli(["data", "stats", data, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_written"] == counts
    assert cli(["data", "stats", data]) == 0
    assert "not written: messages of role 'system': 3" in capsys.readouterr().out
    assert cli(["data", "show", data, "--limit", "7"]) == 0
    assert capsys.readouterr().out.count("[not written: messages of role 'system']") == 3
    assert cli(["data", "show", data, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("not_written") for row in rows] == [["messages of role 'system'"]] * 3 + [None] * 4
    assert cli(["data", "verify", data]) == 0


def test_two_messages_of_a_lost_role_mark_their_sample_with_that_role_alone(folder: Path, tmp_path: Path) -> None:
    template = KNOWN_ROLES.replace("'system', ", "").replace(", 'tool'", "")
    lost = {"system": ["be kind", "be brief"], "tool": ["fox"]}
    rows = [
        chat(*({"role": role, "content": text} for text in texts), *dialogue("q", role)["messages"])
        for role, texts in reversed(lost.items())
    ]
    spec = TaskSpec(name="n", source="x", messages="messages", valid=0.0, test=0.0)
    mixture = Mixture(tasks=(spec,), chat_template=template)
    settings = PrepareSettings(source="test", tokenizer=folder)
    meta, _ = prepare_mixture(mixture, [rows_source(rows)], tmp_path / "data", settings)
    assert meta.not_written == {"messages of role 'tool'": 1, "messages of role 'system'": 2}
    marks = [sample.not_written for sample in taught_samples(tmp_path / "data", "train", ModelFamily.GPT)]
    assert marks == [("messages of role 'tool'",), ("messages of role 'system'",)]


texts = st.text("abefgnortu <>/\n{}'\"é", min_size=1, max_size=14)
structures = st.fixed_dictionaries(
    {
        "roles": st.lists(
            st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=4, unique=True
        ),
        "content": st.sampled_from(["m.content", "m.content | trim", "m.content | upper | lower", "m.content[:5]"]),
        "header": st.sampled_from(["<|b|>{{ m.role }}\n", "<|a|>", "begun: "]),
    }
)
turns = st.lists(st.tuples(st.sampled_from(["system", "user", "tool"]), texts), min_size=1, max_size=3)


@hypothesis.settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@hypothesis.given(structure=structures, turns=turns, answer=texts)
def test_random_conversations_through_random_templates(
    folder: Path, structure: dict[str, Any], turns: list[tuple[str, str]], answer: str
) -> None:
    """Every text stands in what is trained, or its role is counted; every answer is learned whole, or an error."""
    template = (
        f"{{% for m in messages %}}{{% if m.role in {structure['roles']} %}}{structure['header']}"
        f"{{{{ {structure['content']} }}}}<|end|>{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{structure['header'].replace('{{ m.role }}', 'assistant')}{{% endif %}}"
    )
    messages = [{"role": role, "content": text} for role, text in turns] + [{"role": "assistant", "content": answer}]

    def plain(text: str) -> str:
        return "".join(text.split())

    def written(text: str) -> str:
        return text[:5] if "[:5]" in structure["content"] else text

    try:
        block = encoded(folder, [{"messages": messages}], template=template)
    except DataError:
        is_whole = "assistant" in structure["roles"] and plain(written(answer)) == plain(answer)
        if plain(answer) and is_whole:
            raise
        return
    (text,) = shown(folder, block)
    assert plain(answer) in plain(text.rpartition("[")[2] if "[" not in answer else text)
    for role, said in turns:
        is_lost = bool(plain(said)) and (role not in structure["roles"] or plain(written(said)) != plain(said))
        if is_lost:
            assert block.not_written[f"messages of role {role!r}"] >= 1
    lost = sum(
        bool(plain(said)) and (role not in structure["roles"] or plain(written(said)) != plain(said))
        for role, said in turns
    )
    assert block.not_written.total() == lost
