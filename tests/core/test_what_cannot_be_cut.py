"""The table of what cannot be cut, in docs/models.md: each row is refused, and what it names in place of it is cut."""

from __future__ import annotations

import contextvars
import ctypes
import io
import itertools
import os
import queue
import random
import re
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import splitfed as sf
from splitfed.core.errors import InvalidInput
from splitfed.topologies import u_shaped, vanilla

X = torch.linspace(-1.0, 1.0, 48).sin().view(8, 6)
X3 = torch.linspace(-1.0, 1.0, 240).sin().view(8, 5, 6)
IDS = torch.arange(40).view(8, 5) % 11
GLOBAL = {"steps": 0}
LOCAL = threading.local()
VARIABLE = contextvars.ContextVar("steps", default=0)
Forward = Callable[[Any, Tensor], Any]


class Layers(nn.Module):
    """Three layers, joined by whatever `forward` is passed in, with what `setup` adds."""

    def __init__(self, forward: Forward, setup: Callable[[Any], object] | None = None) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.joined = forward
        if setup is not None:
            setup(self)

    def forward(self, x: Tensor) -> Any:
        return self.joined(self, x)

    def layer(self, h: Tensor) -> Any:
        return self.a(h)


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        if tied:
            self.c.weight = self.a.weight

    def forward(self, ids: Tensor) -> Any:
        return self.c(self.b(self.a(ids).mean(1)))


class Draws(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * (1 + 0.1 * np.random.rand())  # noqa: NPY002


def dropped(m: Any, h: Tensor) -> Tensor:
    return functional.dropout(h, 0.0, training=m.training)


def between(act: Forward) -> Forward:
    """Return a forward that does `act` with what the first layer returns; no trace follows it."""
    return lambda m, x: m.c(m.b(act(m, dropped(m, m.a(x)))))


PLAIN = between(lambda m, h: h)


@dataclass(frozen=True)
class Row:
    """What is refused, with a text that its error has, and what is cut in place of it."""

    text: str
    forward: Forward = PLAIN
    setup: Callable[[Any], object] | None = None
    cuts: str | Sequence[str] = "a"
    example: Tensor = field(default=X, repr=False)
    make: Callable[[], nn.Module] | None = None
    instead: dict[str, Any] | None = None

    def cut(self, **changed: Any) -> None:
        given = {name: getattr(self, name) for name in ("forward", "setup", "cuts", "example", "make")} | changed
        model = given["make"] or (lambda: Layers(given["forward"], given["setup"]))
        shape = given.get("shape", vanilla)
        options = given.get("options", {})
        shape(model(), given["cuts"], example=given["example"], task=sf.classification(4), **options)


def attribute(name: str, make: Callable[[], Any]) -> Callable[[Any], object]:
    return lambda m: setattr(m, name, make())


def buffer(name: str, value: Tensor | None, persistent: bool = True) -> Callable[[Any], object]:
    return lambda m: m.register_buffer(name, value, persistent=persistent)


def repeated(m: Any, x: Tensor) -> Any:
    h = m.a(x)
    for _ in range(int(h.abs().max() * 3)):
        h = h * 1.01
    return m.c(m.b(h))


def counted(m: Any, h: Tensor) -> Tensor:
    m.steps += 1
    return h * (1 + 0.01 * m.steps)


def counted_in_a_buffer(m: Any, h: Tensor) -> Tensor:
    if m.training:
        m.steps.add_(1)
    return h * (1 + 0.01 * m.steps)


def counted_in_a_global(m: Any, h: Tensor) -> Tensor:
    GLOBAL["steps"] += 1
    return h * (1 + 0.01 * GLOBAL["steps"])


def counted_in_a_thread(m: Any, h: Tensor) -> Tensor:
    LOCAL.steps = getattr(LOCAL, "steps", 0) + 1
    return h * (1 + 0.01 * LOCAL.steps)


def counted_in_a_context(m: Any, h: Tensor) -> Tensor:
    VARIABLE.set(VARIABLE.get() + 1)
    return h * (1 + 0.01 * VARIABLE.get())


def counted_in_the_environment(m: Any, h: Tensor) -> Tensor:
    os.environ["SPLITFED_STEPS"] = str(int(os.environ.get("SPLITFED_STEPS", "0")) + 1)
    return h * (1 + 0.01 * int(os.environ["SPLITFED_STEPS"]))


def counted_in_a_default(m: Any, h: Tensor, steps: list[int] = [0]) -> Tensor:  # noqa: B006
    steps[0] += 1
    return h * (1 + 0.01 * steps[0])


def counting() -> Forward:
    steps = 0

    def count(m: Any, h: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        return h * (1 + 0.01 * steps)

    return count


def overwriting(m: Any, x: Tensor) -> Any:
    h = m.a(x) * 1.0
    view = h[:, :]
    return m.c(m.b(dropped(m, h.mul_(2.0))) + view)


def written_into_zeros(m: Any, x: Tensor) -> Any:
    out, h = torch.zeros(len(x), 6), dropped(m, m.a(x))
    out[:, :3] = h[:, :3]
    return m.c(m.b(out))


def none_at_first(m: Any, h: Tensor) -> Tensor:
    h = h if m.state is None else h + m.state
    if m.training:
        m.state = h.detach().mean(0)
    return h


def zeros_at_first(m: Any, h: Tensor) -> Tensor:
    h = h + m.state
    if m.training:
        m.state.copy_(h.detach().mean(0))
    return h


def other_in_training(m: Any, x: Tensor) -> Any:
    y = PLAIN(m, x)
    return {"y": y, "z": y * 2} if m.training else {"y": y}


def checkpointed(m: Any, x: Tensor) -> Any:
    return m.c(checkpoint(lambda h: m.b(dropped(m, m.a(h).relu())), x, use_reentrant=False))


def opened() -> Any:
    return open(__file__)


def kept_by_a_hook(m: Any) -> None:
    m.kept = {}
    m.b.register_forward_hook(lambda _, given, returned: m.kept.update(b=returned))


def sparse_product(m: Any, h: Tensor) -> Tensor:
    return torch.sparse.mm(m.matrix, h.T).T


def sending(make: Callable[[Tensor], Any], back: Callable[[Any], Tensor]) -> dict[str, Any]:
    forward: Forward = lambda m, x: m.c(back(m.s(make(m.a(x)))))  # noqa: E731
    return {"forward": forward, "setup": attribute("s", nn.Identity), "cuts": "s"}


def lazy(m: Any) -> None:
    m.s = nn.LazyLinear(6)


def called_lazy(m: Any) -> None:
    lazy(m)
    m.s(X)


SUB = between(lambda m, h: m.s(h))
STATE = "Python values cannot steer it"
UNREAD = "whose state can be neither compared nor turned back"
IN_A_BUFFER = {"forward": between(counted_in_a_buffer), "setup": buffer("steps", torch.zeros(()))}
SENT: dict[str, Any] = {"options": {"sent_inputs": ("x",)}}
FIRST: dict[str, Any] = {"options": {"output": "0"}}
EYE = torch.eye(6)

ROWS: dict[str, Row] = {
    "tied weights": Row(
        "weights tied across a cut",
        make=lambda: Tied(True),
        example=IDS,
        instead={"shape": u_shaped, "cuts": ("a", "b")},
    ),
    "tied weights, untied": Row(
        "weights tied across", make=lambda: Tied(True), example=IDS, instead={"make": lambda: Tied(False)}
    ),
    "a raw input": Row("reads 'x', raw data", lambda m, x: m.c(m.b(dropped(m, m.a(x))) + x), instead=SENT),
    "what is made of it": Row(
        "reads 'x', raw data", lambda m, x: m.c(m.b(dropped(m, m.a(x))) + 2 * x - 1), instead=SENT
    ),
    "a folded batch": Row(
        "the first dimension must be the batch",
        lambda m, x: m.c(m.b(dropped(m, m.a(x.reshape(-1, 6)))).view(len(x), 5, 6).mean(1)),
        example=X3,
        instead={"forward": lambda m, x: m.c(m.b(dropped(m, m.a(x)).reshape(-1, 6)).view(len(x), 5, 6).mean(1))},
    ),
    "how often": Row("takes a number out of a tensor", repeated, cuts="b", instead={"cuts": "a"}),
    "how large": Row(
        "takes a number out of a tensor",
        between(lambda m, h: h + h[h > 0].mean()),
        cuts="b",
        instead={"forward": between(lambda m, h: h + torch.where(h > 0, h, 0.0).mean())},
    ),
    "how large, a question": Row(
        "takes a number out of a tensor",
        between(lambda m, h: h + h[h > 0].mean()),
        cuts="b",
        instead={"forward": between(lambda m, h: h * 2 if h.max() > 0.3 else h)},
    ),
    "a branch on a count": Row(
        STATE,
        between(lambda m, h: counted(m, h) if m.steps % 2 else torch.relu(counted(m, h))),
        attribute("steps", int),
        "b",
        instead={"forward": between(lambda m, h: torch.relu(h))},
    ),
    "state in an attribute": Row(STATE, between(counted), attribute("steps", int), instead=IN_A_BUFFER),
    "state in an iterator": Row(
        STATE, between(lambda m, h: h * (1 + 0.01 * next(m.steps))), attribute("steps", itertools.count)
    ),
    "state in a global": Row(STATE, between(counted_in_a_global)),
    "state in a thread": Row(STATE, between(counted_in_a_thread)),
    "state in a context": Row(STATE, between(counted_in_a_context)),
    "state in the environment": Row(STATE, between(counted_in_the_environment)),
    "state in a default": Row(STATE, between(counted_in_a_default)),
    "state in a closure": Row(STATE, between(counting())),
    "a queue": Row(UNREAD, setup=attribute("o", queue.SimpleQueue), forward=between(lambda m, h: (m.o, h)[1])),
    "a file": Row(UNREAD, setup=attribute("o", opened), forward=between(lambda m, h: (m.o, h)[1])),
    "bytes in memory": Row(UNREAD, setup=attribute("o", io.BytesIO), forward=between(lambda m, h: (m.o, h)[1])),
    "ctypes": Row(
        UNREAD, setup=attribute("o", lambda: ctypes.c_double(2.0)), forward=between(lambda m, h: h * m.o.value)
    ),
    "sqlite3": Row(
        UNREAD, setup=attribute("o", lambda: sqlite3.connect(":memory:")), forward=between(lambda m, h: (m.o, h)[1])
    ),
    "flat": Row(UNREAD, setup=attribute("o", lambda: np.ones(4).flat), forward=between(lambda m, h: h * m.o[0])),
    "tee": Row(
        UNREAD, setup=attribute("o", lambda: itertools.tee([1, 2])[0]), forward=between(lambda m, h: (m.o, h)[1])
    ),
    "zip": Row(UNREAD, setup=attribute("o", lambda: zip([1], [2])), forward=between(lambda m, h: (m.o, h)[1])),  # noqa: B905
    "a bound next": Row(
        UNREAD, setup=attribute("o", lambda: iter([1, 2]).__next__), forward=between(lambda m, h: (m.o, h)[1])
    ),
    "a generator at work": Row(
        "is a generator at work",
        setup=attribute("o", lambda: (i for i in range(9))),
        forward=between(lambda m, h: (m.o, h)[1]),
        instead={"setup": attribute("o", lambda: [1, 2])},
    ),
    "draws of NumPy": Row(
        "other random numbers are drawn from numpy.random",
        between(lambda m, h: h * (1 + 0.1 * np.random.rand())),  # noqa: NPY002
        cuts="before:b",
        instead={"forward": SUB, "setup": attribute("s", Draws)},
    ),
    "draws of Python": Row(
        "other random numbers are drawn from random",
        between(lambda m, h: h * (1 + 0.1 * random.random())),
        cuts="before:b",
        instead={"forward": between(lambda m, h: h * (1 + 0.1 * torch.rand(())))},
    ),
    "overwritten in place": Row(
        "overwrites in place", overwriting, cuts="before:b", instead={"forward": written_into_zeros}
    ),
    "none at first": Row(
        "state that is None at first can begin as zeros",
        between(none_at_first),
        attribute("state", lambda: None),
        "b",
        instead={"forward": between(zeros_at_first), "setup": buffer("state", torch.zeros(6))},
    ),
    "a lambda with a submodule": Row(
        "'f' of Layers is a function or a reference that leads to a Layers: .*; make it a method",
        lambda m, x: m.c(m.b(dropped(m, m.f(x)))),
        lambda m: setattr(m, "f", lambda h: m.a(h)),
        instead={"forward": lambda m, x: m.c(m.b(dropped(m, m.layer(x))))},
    ),
    "a hook on a weight": Row(
        "weight 'a.weight' of Layers has a hook",
        setup=lambda m: m.a.weight.register_hook(lambda g: g * 0.5),
        instead={"setup": lambda m: m.a.weight.requires_grad_(False)},
    ),
    "a hook behind a gradient": Row(
        "weight 'a.weight' of Layers has a hook",
        setup=lambda m: m.a.weight.register_post_accumulate_grad_hook(lambda p: None),
    ),
    "other values in training": Row(
        "return the same in both modes", other_in_training, instead={"forward": lambda m, x: {"y": PLAIN(m, x)}}
    ),
    "a checkpoint around a cut": Row("a checkpoint around a cut", checkpointed, instead={"cuts": "before:c"}),
    "an input as a result": Row("returns one of its inputs", lambda m, x: (PLAIN(m, x), x), instead=FIRST),
    "a constant as a result": Row(
        "returns a constant", lambda m, x: (PLAIN(m, x), torch.ones(len(x), 2)), instead=FIRST
    ),
    "what a hook takes out": Row(
        "the model must have one output", lambda m, x: (PLAIN(m, x), m.kept["b"]), kept_by_a_hook, instead=FIRST
    ),
    "a sparse buffer": Row(
        "'matrix' of Layers is sparse",
        between(sparse_product),
        buffer("matrix", EYE.to_sparse()),
        instead={"setup": buffer("matrix", EYE.to_sparse(), persistent=False)},
    ),
    "a sparse weight": Row(
        "'matrix' of Layers is sparse",
        between(sparse_product),
        attribute("matrix", lambda: nn.Parameter(EYE.to_sparse())),
        instead={"setup": attribute("matrix", EYE.to_sparse)},
    ),
    "a nested tensor": Row(
        "'n' of Layers is nested",
        between(lambda m, h: h * m.n[1].sum()),
        attribute("n", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        instead={"setup": attribute("n", lambda: [torch.ones(2), torch.ones(3)])},
    ),
    "sends sparse values": Row(
        "is sparse, and messages carry dense tensors alone",
        **sending(lambda h: h.to_sparse(), lambda h: h.to_dense()),
        instead=sending(lambda h: h.to_sparse().to_dense(), lambda h: h),
    ),
    "sends complex values": Row(
        "complex64, and messages carry real numbers alone",
        **sending(lambda h: torch.complex(h, h), lambda h: h.real),
        instead=sending(lambda h: torch.view_as_real(torch.complex(h, h)), lambda h: h[..., 0]),
    ),
    "sends quantized values": Row(
        "is quantized, and messages carry dense tensors alone",
        **sending(lambda h: torch.quantize_per_tensor(h, 0.1, 0, torch.qint8), Tensor.dequantize),
    ),
    "a scripted submodule": Row(
        "is compiled by TorchScript",
        SUB,
        attribute("s", lambda: torch.jit.script(nn.Linear(6, 6))),
        instead={"setup": attribute("s", lambda: nn.Linear(6, 6))},
    ),
    "an exported submodule": Row(
        "what torch.export makes", SUB, attribute("s", lambda: torch.export.export(nn.Linear(6, 6), (X,)).module())
    ),
    "a lazy layer": Row("'s.weight' of Layers has no shape yet", SUB, lazy, instead={"setup": called_lazy}),
    "the meta device": Row(
        "on the meta device, without numbers", SUB, attribute("s", lambda: nn.Linear(6, 6, device="meta"))
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_refused_and_what_it_names_instead_is_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPLITFED_STEPS", raising=False)
    row = ROWS[name]
    with pytest.raises(InvalidInput, match=row.text) as caught:
        row.cut()
    assert "\n" not in str(caught.value)
    if row.instead is not None:
        row.cut(**row.instead)


def test_a_branch_on_more_rows_than_the_example_has_is_refused_before_the_first_step() -> None:
    data = sf.data.from_arrays(torch.randn(80, 6), torch.arange(80) % 4).clients(1, auxiliary=4, victims=4)
    forward: Forward = lambda m, x: m.c(torch.relu(m.b(dropped(m, m.a(x)))) if len(x) > 10 else m.b(m.a(x)))  # noqa: E731
    small, large = (
        vanilla(Layers(forward), "before:c", example=torch.randn(rows, 6), task=sf.classification(4))
        for rows in (8, 16)
    )
    with pytest.raises(InvalidInput, match=re.escape("takes another way with 16 rows")):
        sf.train(small, data, rounds=1, batch_size=16)
    assert len(sf.train(large, data, rounds=1, batch_size=16).history) == 1
