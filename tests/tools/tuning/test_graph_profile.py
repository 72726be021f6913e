"""Profiled graphs as text: what becomes of nodes and edges, and files that are not of the form."""

from pathlib import Path

import pytest

from megatron_dynapipe.errors import CostModelError
from megatron_dynapipe.tools.tuning.layer_profile import parse_graph_profile, read_graph_profile


def node(number: int, name: str, forward: float = 1, backward: float = 2, size: str = "8", weights: float = 4) -> str:
    return (
        f"node{number} -- {name} -- forward_compute_time={forward}, backward_compute_time={backward},"
        f" activation_size={size}, parameter_size={weights}"
    )


SKIPPING = "\n".join(
    [
        node(1, "Input0", 17, 3, "1000"),
        node(3, "Attention(in_features=4, (dropout): Dropout(p=0))", size="[2.0; 4.0]"),
        node(2, "Embedding", size="10"),
        node(4, "Loss") + " -- stage_id=1",
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        " \tnode2 -- node4",
        "\tnode3 -- node4",
        "",
    ]
)


def test_a_graph_with_a_skip() -> None:
    profile = parse_graph_profile(SKIPPING, 2)
    assert [layer.name for layer in profile.layers] == [
        "Embedding",
        "Attention(in_features=4, (dropout): Dropout(p=0))",
        "Loss",
    ]
    # Per sample: the embedding also crosses behind the attention; nothing reads the loss; the input costs nothing.
    assert [layer.boundary_bytes for layer in profile.layers] == [5, 8, 0]
    assert [layer.stored_bytes for layer in profile.layers] == [5, 3, 4]
    assert profile.sizes == (2,) and profile.layers[0].forward_ms == (1,) and profile.layers[0].backward_ms == (2,)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("what is this", "line 1: expected a node or an edge, got 'what is this'"),
        (node(1, "a", size="many"), "line 1: expected numbers forward_compute_time"),
        (node(1, "a").replace("activation_size", "size"), "line 1: expected numbers forward_compute_time"),
        (node(1, "a") + "\n\tnode1 -- node2", "expected edges between nodes of the file, got one of node2"),
        ("\n".join([node(1, "a"), node(2, "b"), "\tnode1 -- node2", "\tnode2 -- node1"]), "without cycles"),
        (node(1, "a", forward=-1), "times and sizes of at least 0"),
        ("", "at least one layer"),
    ],
)
def test_files_that_are_not_of_the_form(text: str, said: str) -> None:
    with pytest.raises(CostModelError, match=said):
        parse_graph_profile(text, 1)


def test_a_file_is_read_in_its_own_order_where_edges_allow(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    with pytest.raises(CostModelError, match="cannot read the profile"):
        read_graph_profile(path, 1)
    path.write_text("\n".join([node(9, "a"), node(1, "b"), node(5, "c"), "\tnode9 -- node5"]))
    assert [layer.name for layer in read_graph_profile(path, 1).layers] == ["a", "b", "c"]
    with pytest.raises(CostModelError, match="at least 1 sample"):
        read_graph_profile(path, 0)
