"""A run that goes on from a checkpoint has every bit of the unbroken one, whatever its segments keep beside weights."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from splitfed.core.equivalence import check_topology
from splitfed.core.errors import InvalidInput
from splitfed.core.replay import ReplayedSegment
from splitfed.core.topology import Head, Segment, Topology
from splitfed.engines.local import LocalEngine
from splitfed.topologies import vanilla
from tests.examples import engine_of, read_back
from tests.thinning import thin


class Keeping(nn.Module):
    """A layer and what it keeps of earlier batches."""

    def __init__(self, start: Callable[[Any], None], keep: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self._keep = nn.Linear(8, 8), keep
        start(self)

    def forward(self, x: Tensor) -> Tensor:
        return self._keep(self, torch.relu(self.fc(x)))


def in_buffer(m: Any, h: Tensor) -> Tensor:
    m.mean.mul_(0.9).add_(h.detach().mean(0))
    return h - m.mean


def in_attribute(m: Any, h: Tensor) -> Tensor:
    last = h if m.last is None else h + m.last
    m.last = h.detach().mean(0)
    return last


def in_list(m: Any, h: Tensor) -> Tensor:
    m.bank.append(h.detach().mean(0))
    return h + torch.stack(list(m.bank)).mean(0)


def in_dict(m: Any, h: Tensor) -> Tensor:
    state = m.state.setdefault("mean", {"value": torch.zeros(8), "seen": 0})
    state["value"] = 0.5 * state["value"] + h.detach().mean(0)
    state["seen"] += 1
    return h - state["value"] / state["seen"]


def in_tuple(m: Any, h: Tensor) -> Tensor:
    if m.hidden is not None:
        h = h + m.hidden[0] - m.hidden[1]
    m.hidden = (h.detach().mean(0), h.detach().amax(0))
    return h


def in_object(m: Any, h: Tensor) -> Tensor:
    m.cfg.step += 1
    return h / m.cfg.step


def of_growing_shape(m: Any, h: Tensor) -> Tensor:
    m.bank = torch.cat([m.bank, h.detach()[:2]])
    return h + m.bank.mean(0)


def under_two_names(m: Any, h: Tensor) -> Tensor:
    m.one.add_(h.detach().mean(0))
    return h + m.other


def cached(m: Any, h: Tensor) -> Tensor:
    if h.shape[1] not in m.tables:
        m.tables[h.shape[1]] = torch.sin(torch.arange(h.shape[1]) * 1.0)
    return h + m.tables[h.shape[1]]


def in_frozen_set(m: Any, h: Tensor) -> Tensor:
    m.seen = m.seen | {len(m.seen)}
    return h / (1 + len(m.seen))


def drawn(m: Any, h: Tensor) -> Tensor:
    return h * torch.rand(8, generator=m.random)


def scaled(m: Any, h: Tensor) -> Tensor:
    return h * float(m.random.random())


def of_numpy(m: Any, h: Tensor) -> Tensor:
    m.bank[0] += np.float32(0.25)
    return h * float(m.bank[0])


def of_range(m: Any, h: Tensor) -> Tensor:
    m.seen, m.raw[0] = range(len(m.seen) + 1), m.raw[0] + 1
    return h * len(m.seen) / m.raw[0]


def aliased(m: Any) -> None:
    m.one = torch.zeros(8)
    m.other = m.one


def with_(**values: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda m: [setattr(m, name, make()) for name, make in values.items()] and None


STATES: dict[str, tuple[Callable[[Any], None], Callable[[Any, Tensor], Tensor]]] = {
    "buffer_that_is_not_saved": (lambda m: m.register_buffer("mean", torch.zeros(8), persistent=False), in_buffer),
    "attribute": (with_(last=lambda: torch.zeros(8)), in_attribute),
    "attribute_none_at_first": (with_(last=lambda: None), in_attribute),
    "list": (with_(bank=list), in_list),
    "deque": (with_(bank=lambda: deque(maxlen=3)), in_list),
    "nested_dict": (with_(state=dict), in_dict),
    "tuple": (with_(hidden=lambda: None), in_tuple),
    "number_in_an_object": (with_(cfg=lambda: SimpleNamespace(step=0)), in_object),
    "growing_shape": (with_(bank=lambda: torch.zeros(1, 8)), of_growing_shape),
    "one_tensor_under_two_names": (aliased, under_two_names),
    "cache": (with_(tables=dict), cached),
    "numbers_of_numpy": (with_(bank=lambda: [np.float32(0.5)]), of_numpy),
    "range_and_bytes": (with_(seen=lambda: range(1), raw=lambda: bytearray(1)), of_range),
    "frozen_set": (with_(seen=lambda: frozenset((0,))), in_frozen_set),
    "generator": (with_(random=lambda: torch.Generator().manual_seed(3)), drawn),
    "generator_of_python": (with_(random=lambda: random.Random(3)), scaled),
    "generator_of_numpy": (with_(random=lambda: np.random.default_rng(3)), scaled),
    "older_generator_of_numpy": (
        with_(random=lambda: np.random.RandomState(3)),
        lambda m, h: h * float(m.random.rand()),
    ),
}


def topology(name: str) -> Topology:
    start, keep = STATES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return by_hand(Keeping(start, keep))


def by_hand(bottom: nn.Module) -> Topology:
    top = nn.Linear(8, 4)
    segments = (
        Segment("bottom", "client", bottom, ("x",), ("h",)),
        Segment("top", "server", top, ("h",), ("out",)),
    )
    return Topology("by hand", segments, {"x": "client"}, (Head("out", "server", "client"),))


def check_resumed(make: Callable[[], Topology], before: Callable[[LocalEngine, int], None] = lambda *_: None) -> None:
    """Hold that four rounds are the same with a checkpoint after two; `before`: called with each round's number."""
    drawn = torch.Generator().manual_seed(5)
    x, y = torch.randn(24, 8, generator=drawn), torch.arange(24) % 4
    steps = list(torch.arange(24).split(4))
    unbroken, broken, resumed = (engine_of(make(), x, y) for _ in range(3))

    def train(engine: LocalEngine, rounds: range) -> None:
        for round_ in rounds:
            before(engine, round_)
            engine.train(0, round_, steps)

    train(unbroken, range(4))
    train(broken, range(2))
    resumed.load_state(read_back(broken.state()))
    train(resumed, range(2, 4))
    for segment, module in unbroken.modules(0).items():
        for key, value in module.state_dict().items():
            assert torch.equal(resumed.modules(0)[segment].state_dict()[key], value), key


@pytest.mark.parametrize("name", STATES)
def test_a_run_resumed_goes_on_as_the_unbroken_one(name: str) -> None:
    check_resumed(lambda: topology(name))


class Recurrent(nn.Module):
    """Adds the mean of what it saw before."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4), torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x)) + self.last
        self.last = h.detach().mean(0)
        return self.c(self.b(h))


def test_a_replayed_segment_resumed_goes_on_as_the_unbroken_one() -> None:
    def make() -> Topology:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = Recurrent()
        return vanilla(model, "b", example=torch.ones(8, 8) * torch.arange(8.0))

    check_resumed(make)


class Completing(nn.Linear):
    """A layer that gives what older pickles of it lack, as those of torch do."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.activation = torch.relu

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        vars(self).setdefault("activation", torch.tanh)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(super().forward(x))


class Encoded(nn.Module):
    """Rows as tokens of one number through `inner`, in a forward that replay alone follows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.tokens, self.inner, self.out = nn.Linear(1, 8), inner, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x[..., None])
        h = h * 2 if self.training else h * 2 + 0
        return self.out(self.inner(h).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "inner", [lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True), Completing]
)
def test_what_a_copy_is_given_anew_by_its_class_is_no_change(inner: Callable[[], nn.Module]) -> None:
    def make() -> Topology:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return vanilla(Encoded(inner()), "tokens", example=torch.randn(8, 8))

    assert all(isinstance(segment.module, ReplayedSegment) for segment in make().segments)
    check_resumed(make)


def test_hooks_are_found_again_whatever_their_numbers_in_the_process() -> None:
    def make() -> Topology:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = Chain()
            # One more model each time: its hooks have other numbers.
            nn.utils.spectral_norm(nn.Linear(8, 8))
            nn.utils.spectral_norm(model.b)
        return vanilla(model, "a", example=torch.ones(8, 8) * torch.arange(8.0))

    check_resumed(make)


def test_what_a_backward_hook_shares_is_refused_at_the_checkpoint_by_a_name_that_can_be_read() -> None:
    class Halves:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, gradient: Tensor) -> Tensor:
            self.calls += 1
            return gradient / self.calls

    model, halve = Chain(), Halves()
    model.b.register_full_backward_hook(lambda _m, given, _result: (halve(given[0]),))
    engine = engine_of(vanilla(model, "a"), torch.randn(24, 8), torch.arange(24) % 4)
    engine.state()
    engine.train(0, 0, list(torch.arange(24).split(4)))
    with pytest.raises(InvalidInput, match=r"the attribute 'calls' of 'b\.backward_hooks\.halve' is not as it was"):
        engine.state()


SHARED = {"steps": 0}


class Mode(Enum):
    """No plain value, and a checkpoint makes no objects of such classes."""

    FIRST = 1
    LATER = 2


def in_enum(m: Any, h: Tensor) -> Tensor:
    m.mode = Mode.LATER
    return h


def by_enum(m: Any, h: Tensor) -> Tensor:
    m.table[Mode.LATER] = h.detach().mean(0)
    return h


def in_global(m: Any, h: Tensor) -> Tensor:
    SHARED["steps"] += 1
    return h


def in_iterator(m: Any, h: Tensor) -> Tensor:
    return h / next(m.numbers)


@pytest.mark.parametrize(
    ("start", "keep", "text"),
    [
        (with_(), in_global, "forward changes the global 'SHARED'"),
        (
            with_(numbers=lambda: iter(range(1, 999))),
            in_iterator,
            "changes the attribute 'numbers' of the model",
        ),
        (
            with_(last=lambda: None),
            lambda m, h: setattr(m, "last", SimpleNamespace(mean=h.detach().mean(0))) or h,
            "forward changes the attribute 'last' of the model",
        ),
        (with_(mode=lambda: Mode.FIRST), in_enum, "forward changes the attribute 'mode' of the model"),
        (with_(table=dict), by_enum, "forward changes"),
    ],
)
def test_state_that_a_checkpoint_cannot_hold_is_refused_before_training(
    start: Callable[[Any], None], keep: Callable[[Any, Tensor], Tensor], text: str
) -> None:
    with pytest.raises(InvalidInput, match=text) as caught:
        check_topology(by_hand(Keeping(start, keep)), {"x": torch.randn(8, 8)})
    assert "which a checkpoint cannot hold; keep what changes in buffers" in str(caught.value)


def counting(m: Any) -> None:
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return steps

    m.count = count


@pytest.mark.parametrize(
    ("start", "keep", "text"),
    [
        (
            with_(seen=set),
            lambda m, h: m.seen.add(h.detach().mean()) or h * len(m.seen),
            r"attribute 'seen' .* a checkpoint cannot hold; .*\(sets of numbers or texts alone\)",
        ),
        (
            with_(seen=lambda: np.array([1.0, None], dtype=object)),
            lambda m, h: m.seen.__setitem__(0, m.seen[0] + 1) or h * m.seen[0],
            "attribute 'seen' .* a checkpoint cannot hold; .* arrays of numbers with memory of their own",
        ),
        (
            counting,
            lambda m, h: h / m.count(),
            "variable 'steps' of function 'count' .*; all copies of the segment share that: keep what changes in",
        ),
    ],
)
def test_the_line_on_what_cannot_be_kept_names_it_and_recommends_no_such_thing(
    start: Callable[[Any], None], keep: Callable[[Any, Tensor], Tensor], text: str
) -> None:
    with pytest.raises(InvalidInput, match=text):
        check_topology(by_hand(Keeping(start, keep)), {"x": torch.randn(8, 8)})


LATE = 11
"""Begins in the second round, behind the batches of the comparison before training, before the checkpoint."""


def later(act: Callable[[Any, Tensor], Tensor], every: bool = False) -> Callable[[Any, Tensor], Tensor]:
    """Return what does nothing up to call LATE, and `act` in it; `every`: and in every later one."""

    def keep(m: Any, h: Tensor) -> Tensor:
        m.calls += 1
        return act(m, h) if m.calls == LATE or (every and m.calls > LATE) else h

    return keep


def hang_on_weight(m: Any, h: Tensor) -> Tensor:
    m.fc.weight.step = getattr(m.fc.weight, "step", 0) + 1
    return h / m.fc.weight.step


def register_late(m: Any, h: Tensor) -> Tensor:
    if m.calls == LATE:
        m.register_buffer("late", h.detach().mean(0))
        m.register_buffer("passing", h.detach().mean(0), persistent=False)
    return h + m.late - 0.5 * m.passing


def keyed_by_module(m: Any, h: Tensor) -> Tensor:
    m.table[m.fc] = m.table[m.fc] + h.detach().mean(0)
    return h + m.table[m.fc]


def counted(start: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return `start` with a count of calls: a tensor, which no cut refuses in a submodule."""
    return lambda m: (start(m), setattr(m, "calls", torch.zeros(())))[0]


LATE_STATES: dict[str, tuple[Callable[[Any], None], Callable[[Any, Tensor], Tensor]]] = {
    "weight_frozen": (with_(), later(lambda m, h: m.fc.weight.requires_grad_(False) is None or h)),
    "attribute_of_a_weight": (with_(), hang_on_weight),
    "attribute_of_a_weight_from_the_start": (lambda m: setattr(m.fc.weight, "step", 1), hang_on_weight),
    "buffers": (with_(), later(register_late, every=True)),
    "key_that_is_a_module": (lambda m: setattr(m, "table", {m.fc: torch.zeros(8)}), later(keyed_by_module, every=True)),
}


class WithKeeping(nn.Module):
    """Two layers around one that keeps something."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.a, self.inner, self.c = nn.Linear(8, 8), inner, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.inner(torch.relu(self.a(x))))


def keeping_late(start: Callable[[Any], None], keep: Callable[[Any, Tensor], Tensor], how: str) -> Topology:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        inner = Keeping(counted(start), keep)
        if how == "by hand":
            return by_hand(inner)
        made = vanilla(WithKeeping(inner), "inner", example=torch.ones(8, 8) * torch.arange(8.0))
        assert all(isinstance(segment.module, ReplayedSegment) for segment in made.segments)
        return made


@pytest.mark.parametrize("how", ["by hand", "replayed"])
@pytest.mark.parametrize("name", thin(LATE_STATES, 2))
def test_what_begins_late_is_resumed_to_the_bit(name: str, how: str) -> None:
    if how == "replayed" and name == "key_that_is_a_module":
        return  # A party holds what it is seen to read, or what its class names.
    if how == "replayed" and name.startswith("attribute_of_a_weight"):
        start, keep = LATE_STATES[name]
        with pytest.raises(InvalidInput, match=r"the attribute 'step' of 'inner\.fc\.weight'"):
            keeping_late(start, keep, how)
        return
    check_resumed(lambda: keeping_late(*LATE_STATES[name], how))


class Chain(nn.Module):
    """A model that can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


class TableChain(Chain):
    """The same, which is replayed."""

    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x)}


@pytest.mark.parametrize("kind", [Chain, TableChain])
def test_a_weight_frozen_between_rounds_stays_frozen_where_the_run_goes_on(kind: type[Chain]) -> None:
    def freeze(engine: LocalEngine, round_: int) -> None:
        if round_ == 1:
            engine.modules(0)["bottom"].get_parameter("a.weight").requires_grad_(False)

    check_resumed(lambda: cut_chain(kind), freeze)


def cut_chain(kind: type[Chain], frozen: str = "") -> Topology:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = kind()
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    return vanilla(model, "b", example=torch.ones(8, 8) * torch.arange(8.0))


@pytest.mark.parametrize("kind", [Chain, TableChain])
def test_a_weight_that_learns_late_is_refused_at_its_first_gradient(kind: type[Chain]) -> None:
    def thaw(engine: LocalEngine, round_: int) -> None:
        if round_ == 1:
            engine.modules(0)["bottom"].get_parameter("a.weight").requires_grad_(True)

    with pytest.raises(InvalidInput, match=r"weight 'a\.weight' of segment 'bottom' was frozen.*no optimizer"):
        check_resumed(lambda: cut_chain(kind, "a.weight"), thaw)


TIMES = {"n": 0}
FACTOR = 1


class Counting(Keeping):
    """Counts in its class."""

    count = 0


def in_class(m: Any, h: Tensor) -> Tensor:
    type(m).count += 1
    return h / type(m).count


def in_table(m: Any, h: Tensor) -> Tensor:
    TIMES["n"] += 1
    return h / TIMES["n"]


def in_name(m: Any, h: Tensor) -> Tensor:
    global FACTOR
    FACTOR += 1
    return h / FACTOR


def in_default(m: Any, h: Tensor, log: list[int] = [0]) -> Tensor:  # noqa: B006
    log[0] += 1
    return h / log[0]


def replace_weight(m: Any, h: Tensor) -> Tensor:
    m.fc.weight = nn.Parameter(2 * m.fc.weight.detach())
    return h


@pytest.mark.parametrize("how", ["by hand", "replayed"])
@pytest.mark.parametrize(
    ("keep", "text"),
    thin(
        [
            (later(in_class, every=True), "attribute 'count' of class Counting is not as it was before training"),
            (later(in_table, every=True), "the global 'TIMES' is not as it was before training"),
            (later(in_name, every=True), "the global 'FACTOR' is not as it was before training"),
            (later(in_default, every=True), "the default of the argument 'log' of function 'in_default'"),
            (later(lambda m, h: setattr(m, "act", torch.relu) or h), "the attribute 'act' of .* is not as it was"),
            (later(lambda m, h: setattr(m, "act", lambda z: z) or h), "the attribute 'act' of .* is not as it was"),
            (later(lambda m, h: setattr(m, "more", nn.Identity()) or h), "the submodule 'more' of .* is not as it was"),
            (
                later(lambda m, h: setattr(m, "o", SimpleNamespace(n=1)) or h),
                "the attribute 'o' of .* is not as it was",
            ),
            (later(lambda m, h: setattr(m, "mode", Mode.LATER) or h), "the attribute 'mode' of .* is not as it was"),
            (later(lambda m, h: m.fc.register_forward_hook(print) and h), "submodule 'fc' of .* is not as it was"),
            (later(replace_weight), r"the weight '(inner\.)?fc.weight' is not the one from before training"),
        ],
        2,
    ),
)
def test_what_begins_late_and_no_checkpoint_holds_is_refused_where_one_is_written(
    keep: Callable[[Any, Tensor], Tensor], text: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counting, "count", 0)
    monkeypatch.setitem(TIMES, "n", 0)
    monkeypatch.setattr("tests.core.test_unsaved_state.Keeping", Counting)
    with pytest.raises(InvalidInput, match=text):
        check_resumed(lambda: keeping_late(with_(mode=lambda: Mode.FIRST), keep, how))


CACHE: dict[Any, Tensor] = {}
MASK: Tensor | None = None


def in_caches(m: Any, h: Tensor) -> Tensor:
    global MASK
    MASK = torch.ones(8) if MASK is None else MASK
    if h.shape not in CACHE:
        CACHE[h.shape] = torch.sin(torch.arange(8.0))
    return h + CACHE[h.shape] * MASK


def test_a_cache_in_a_global_is_no_state() -> None:
    check_resumed(lambda: keeping_late(with_(), in_caches, "replayed"))


class TwoCopies(nn.Module):
    """A plain tensor that both sides of a cut after `b` read, and that the rows of the first side change."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.mean, self.calls = torch.zeros(8), torch.zeros(())

    def change(self, h: Tensor) -> None:
        self.mean.data.add_(h.detach().mean(0))

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        self.calls.add_(1)
        self.change(h)
        h = self.b(h + 0 * self.mean)
        return {"y": self.c(torch.where(self.calls > 12, h + self.mean, h))}


class Counter(TwoCopies):
    """Both sides count alike."""

    def change(self, h: Tensor) -> None:
        """Change nothing."""


def test_copies_of_a_plain_tensor_that_part_are_refused_though_no_output_shows_it_yet() -> None:
    rows_ = torch.ones(8, 8) * torch.arange(8.0)
    with pytest.raises(InvalidInput, match="'add_' changes in place a tensor that is kept beside the state"):
        vanilla(TwoCopies(), "b", example=rows_)


def test_a_counter_is_no_cache_that_is_filled_before_the_cut() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Counter()
    topology = vanilla(model, "b", example=torch.ones(8, 8) * torch.arange(8.0))
    assert [float(vars(segment.module)["calls"]) for segment in topology.segments] == [0.0, 0.0]


NUMBERS = (float(number) for number in range(1, 999))


class OfAGlobalGenerator(TwoCopies):
    """Takes its numbers from a generator that cannot be turned back."""

    def forward(self, x: Tensor) -> Any:
        return {"y": self.c(self.b(self.a(x)) * next(NUMBERS))}


@pytest.mark.parametrize("example", [True, False])
def test_a_generator_at_work_in_a_global_is_refused_before_it_has_moved(
    example: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "NUMBERS", (float(number) for number in range(1, 999)))
    rows_ = torch.ones(8, 8) * torch.arange(8.0)
    with pytest.raises(InvalidInput, match="global 'NUMBERS' is a generator at work"):
        vanilla(OfAGlobalGenerator(), "b", example=rows_ if example else None)
    bottom = Keeping(with_(), lambda m, h: h * next(NUMBERS))
    with pytest.raises(InvalidInput, match="global 'NUMBERS' is a generator at work"):
        check_topology(by_hand(bottom), {"x": rows_})
    assert next(NUMBERS) == 1.0
