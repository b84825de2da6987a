"""Custom topologies: objects and mappings mean the same, segments find their order, mistakes are one line."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from splitfed.core.errors import InvalidInput
from splitfed.core.tasks import classification, regression
from splitfed.core.topology import Head, Segment
from splitfed.topologies.custom import custom

WIRE = nn.Identity()


def segment(name: str, role: str, *inputs: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "role": role, "module": WIRE, "inputs": list(inputs), **more}


# x at the client; the server joins a and b, which reads a.
DIAMOND = [
    segment("top", "server", "a", "b"),
    segment("b", "client", "a"),
    segment("a", "client", "x"),
]
INPUTS = {"x": "client"}
HEADS = [{"value": "top", "labels": "client"}]


def test_segments_run_in_the_order_of_what_they_read() -> None:
    topology = custom(DIAMOND, INPUTS, HEADS)
    assert [s.name for s in topology.segments] == ["a", "b", "top"]
    assert [(e.name, e.values) for e in topology.crossings] == [("a->top", ("a",)), ("b->top", ("b",))]
    assert topology.heads == (Head("top", "server", "client"),)
    # What could run at once keeps the order in which it is written.
    side = [segment("two", "client", "x"), segment("one", "client", "x"), segment("top", "server", "one", "two")]
    assert [s.name for s in custom(side, INPUTS, HEADS).segments] == ["two", "one", "top"]


def test_objects_and_mappings_mean_the_same() -> None:
    objects = [Segment(d["name"], d["role"], WIRE, tuple(d["inputs"]), (d["name"],)) for d in DIAMOND]
    assert custom(objects, INPUTS, [Head("top", "server", "client")]) == custom(DIAMOND, INPUTS, HEADS)
    named = segment("top", "server", "a", "b", outputs=["logits"], prefix="last.")
    topology = custom([named, *DIAMOND[1:]], INPUTS, [{"value": "logits", "labels": "server", "weight": 2}])
    assert topology.segment("top").outputs == ("logits",)
    assert topology.segment("top").full("weight") == "last.weight"
    assert topology.heads == (Head("logits", "server", "server", None, 2),)


def test_the_task_goes_to_heads_without_one() -> None:
    own, other = regression(), classification(3)
    heads = [{"value": "top", "labels": "client", "task": own}, {"value": "b", "labels": "client"}]
    found = custom(DIAMOND, INPUTS, heads, other).heads
    assert [head.task for head in found] == [own, other]


def test_it_computes_what_the_graph_says() -> None:
    """The order is right only if b has what a made: 2 * 3 + 2 = 8."""

    class Times(nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.by * x

    class Plus(nn.Module):
        def forward(self, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
            return one + two

    modules = {"a": Times(2.0), "b": Times(3.0), "top": Plus()}
    topology = custom([{**d, "module": modules[d["name"]]} for d in DIAMOND], INPUTS, HEADS)
    values = {"x": torch.ones(2, 1)}
    for s in topology.segments:
        values[s.outputs[0]] = s.module(*(values[name] for name in s.inputs))
    assert values["top"].tolist() == [[8.0], [8.0]]


def changed(i: int, **more: Any) -> list[Any]:
    return [{**d, **more} if j == i else d for j, d in enumerate(DIAMOND)]


def without(i: int, key: str) -> list[Any]:
    return [{k: v for k, v in d.items() if j != i or k != key} for j, d in enumerate(DIAMOND)]


WRONG: list[tuple[Any, Any, Any, str]] = [
    ([], INPUTS, HEADS, r"segments=\[\] is not allowed; expected a list with at least one table"),
    ("abc", INPUTS, HEADS, r"segments='abc' is not allowed; expected a list"),
    (DIAMOND, INPUTS, [], r"heads=\[\] is not allowed; expected a list with at least one table"),
    (DIAMOND, {}, HEADS, r"inputs=\{\} is not allowed; expected value -> role that owns it, at least one"),
    (DIAMOND, {"x": 1}, HEADS, r"inputs=\{'x': 1\} is not allowed; expected value -> role"),
    ([*DIAMOND, 3], INPUTS, HEADS, r"segments\[3\] is a int; expected a Segment or a mapping"),
    (changed(1, rôle="x"), INPUTS, HEADS, r"unknown key of segments\[1\]: 'rôle'; did you mean 'role'\? \(allowed: "),
    (without(1, "role"), INPUTS, HEADS, r"segments\[1\] has no 'role'; it has 'name', 'module', 'inputs'"),
    (changed(1, role=4), INPUTS, HEADS, r"segments\[1\]: role=4 is not allowed; expected text"),
    (changed(1, prefix=4), INPUTS, HEADS, r"segments\[1\]: prefix=4 is not allowed; expected text"),
    (changed(1, module="mlp"), INPUTS, HEADS, r"segments\[1\]: module is a str; expected an nn\.Module"),
    (changed(1, inputs="a"), INPUTS, HEADS, r"segments\[1\]: inputs='a' is not allowed; expected a list of names"),
    (changed(1, outputs=[1]), INPUTS, HEADS, r"segments\[1\]: outputs=\[1\] is not allowed; expected a list of names"),
    (
        changed(1, inputs=["aa"]),
        INPUTS,
        HEADS,
        r"unknown value read by segment 'b': 'aa'; did you mean 'a'\? \(allowed",
    ),
    (changed(2, inputs=["b"]), INPUTS, HEADS, r"segments 'b', 'a' wait for one another: a cycle"),
    (changed(1, inputs=["b"]), INPUTS, HEADS, r"segment 'b' reads what it returns: a cycle"),
    (changed(1, name="a", outputs=["b"]), INPUTS, HEADS, r"segment 'a' appears twice; every segment needs a name"),
    (DIAMOND, INPUTS, [{"value": "top"}], r"heads\[0\] has no 'labels'; it has 'value'"),
    (DIAMOND, INPUTS, [{"value": "tip", "labels": "client"}], r"unknown value at a head: 'tip'; did you mean 'top'\?"),
    (DIAMOND, INPUTS, [{**HEADS[0], "role": "client"}], r"the head on 'top' computes its loss at role 'client', but"),
    (
        DIAMOND,
        INPUTS,
        [{**HEADS[0], "weight": "1"}],
        r"heads\[0\]: weight='1' is not allowed; expected a number in \(0",
    ),
    (DIAMOND, INPUTS, [{**HEADS[0], "target": []}], r"heads\[0\]: target=\[\] is not allowed; expected text"),
    (DIAMOND, INPUTS, [{**HEADS[0], "via": "hop"}], r"heads\[0\]: via='hop' is not allowed; expected a list of names"),
]


@pytest.mark.parametrize(("segments", "inputs", "heads", "pattern"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_a_mistake_is_one_line(segments: Any, inputs: Any, heads: Any, pattern: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        custom(segments, inputs, heads)
    text = str(caught.value)
    assert "\n" not in text
    assert re.match(pattern, text), text


def test_a_mistyped_holder_of_labels_is_refused_and_a_named_one_is_not() -> None:
    segments = [
        {"name": "bottom", "role": "client", "module": nn.Linear(4, 3), "inputs": ["x"]},
        {"name": "top", "role": "server", "module": nn.Linear(3, 2), "inputs": ["bottom"]},
    ]
    heads = [{"value": "top", "labels": "servr"}]
    with pytest.raises(InvalidInput, match=r"unknown role at the head on 'top' .*'servr'; did you mean 'server'"):
        custom(segments, {"x": "client"}, heads)
    assert custom(segments, {"x": "client"}, heads, holders=["servr"]).data_roles == ("client", "servr")
