"""Structured damage to what people write: a value of a wrong kind or size somewhere in a document, or bytes changed."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]

WRONG: tuple[Any, ...] = (
    *(None, True, False, "", "x", "16", "-1", "\0", "é" * 40, "../..", "x" * 100_000),
    *([], [1], ["a"], [[]], {}, {"a": 1}, [[[[[[]]]]]], {"get": None}),
    *(-1, 0, 1, 3, 3.7, -0.5, 1e-308, 1e308, -1e308, float("nan"), float("inf")),
    *(2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30),
)
"""Values of every kind, at the edges of what numbers hold."""


def places(node: Any, path: Path = ()) -> Iterator[Path]:
    """All places in a document, its root first."""
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def at(node: Any, path: Path) -> Any:
    """What stands at a place."""
    for key in path:
        node = node[key]
    return node


def mutated(document: Any, draw: random.Random) -> tuple[Any, str]:
    """A copy of a document with a change or two, and the changes in words."""
    changed = copy.deepcopy(document)
    said = []
    for _ in range(draw.choice((1, 1, 1, 2))):
        path = draw.choice(list(places(changed)))
        if not path:
            value = copy.deepcopy(draw.choice(WRONG))
            return value, f"{said} all = {value!r:.60}"
        owner = at(changed, path[:-1])
        match draw.randrange(8):
            case 0:
                del owner[path[-1]]
                said.append(f"without {path}")
            case 1 if isinstance(owner, dict):
                owner[f"{path[-1]}x"] = owner[path[-1]]
                said.append(f"copy of {path}")
            case 2 if isinstance(owner, list):
                owner *= 3
                said.append(f"three times {path[:-1]}")
            case 3 if isinstance(owner[path[-1]], int | float):
                owner[path[-1]] *= draw.choice((-1, 2, 1000, 10**9, 0.5))
                said.append(f"{path} = {owner[path[-1]]!r:.60}")
            case _:
                owner[path[-1]] = copy.deepcopy(draw.choice(WRONG))
                said.append(f"{path} = {owner[path[-1]]!r:.60}")
    return changed, "; ".join(said)


def damaged(data: bytes, draw: random.Random) -> tuple[bytes, str]:
    """Bytes of which some are changed, missing, or more."""
    place = draw.randrange(len(data) + 1)
    match draw.randrange(4):
        case 0:
            return data[:place], f"cut at {place}"
        case 1:
            more = draw.randbytes(draw.choice((1, 8, 200)))
            return data[:place] + more + data[place:], f"{len(more)} more at {place}"
        case 2:
            return data[:place] + data[place + 8 :], f"8 fewer at {place}"
    changed = bytearray(data)
    for _ in range(draw.choice((1, 4, 64))):
        changed[draw.randrange(len(data))] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
    return bytes(changed), "changed bytes"


def as_text(document: Any) -> bytes:
    """A document as JSON, which is YAML."""
    return json.dumps(document, ensure_ascii=False).encode()


def as_lines(rows: Any) -> bytes:
    """Rows as JSON lines."""
    return b"".join(as_text(row) + b"\n" for row in (rows if isinstance(rows, list) else [rows]))
