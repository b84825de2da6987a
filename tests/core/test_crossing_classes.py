"""What crosses beside features: inputs in disguise are refused or named, masks are sent as they are and told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import splitfed as sf
from splitfed.core.contents import MANY, Content
from splitfed.core.cut_places import cut_places
from splitfed.core.defense import (
    Accounted,
    Defense,
    LayerDefense,
    PenaltyDefense,
    ReleaseDefense,
)
from splitfed.core.equivalence import check_topology
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.messages import Recording
from splitfed.core.optimizers import Optim
from splitfed.core.random import stream
from splitfed.core.step_plan import segment_plans
from splitfed.core.tasks import classification
from splitfed.core.topology import Head, Segment, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.privacy.exposures import find_exposures
from splitfed.privacy.ledger import make_ledger
from splitfed.topologies import custom, multi_hop, u_shaped, vanilla
from tests.defenses.test_every_defense import DEFENSES
from tests.examples import engine_of
from tests.predicted_bytes import step_bytes
from tests.thinning import thin

ROWS, LENGTH, WORDS = 24, 16, 12
LOWEST = torch.finfo(torch.float32).min
DECAY = Optim("SGD", {"lr": 0.05, "momentum": 0.9})


class Affine(nn.Module):
    """Crosses after `a` with an affine image of its input beside features; `result` makes of what it returns."""

    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.result = result
        self.a, self.b, self.skip = nn.Linear(8, 8), nn.Linear(8, 10), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Any:
        x = x * 2 - 1
        return self.result(self.b(functional.relu(self.a(x))) + self.skip(x))


class Padded(nn.Module):
    """Weighs features by scores to which a mask of padding (id 0) is added: zeros, and the smallest number there is."""

    def __init__(self, result: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.result = result
        self.words, self.a = nn.Embedding(WORDS, 4), nn.Linear(4 * LENGTH, LENGTH)
        self.b, self.head = nn.Linear(LENGTH, LENGTH), nn.Linear(LENGTH, 10)

    def forward(self, ids: Tensor) -> Any:
        mask = (ids == 0) * LOWEST
        h = self.a(self.words(ids).flatten(1))
        return self.result(self.head((self.b(h) + mask).softmax(1) * h.relu()))


class Bottom(nn.Module):
    """The client's part of `Padded`."""

    def __init__(self, whole: Padded) -> None:
        super().__init__()
        self.words, self.a = whole.words, whole.a

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(self.words(ids).flatten(1)), (ids == 0) * LOWEST


class Top(nn.Module):
    """The server's part of `Padded`."""

    def __init__(self, whole: Padded) -> None:
        super().__init__()
        self.b, self.head = whole.b, whole.head

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return self.head((self.b(h) + mask).softmax(1) * h.relu())


def itself(value: Tensor) -> Tensor:
    return value


def table(value: Tensor) -> dict[str, Tensor]:
    return {"logits": value}


def ids(rows: int = ROWS) -> Tensor:
    found = torch.randint(1, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    found[::2, 4:] = 0
    return found


def images(rows: int = 40) -> Tensor:
    return torch.rand(rows, 8, generator=torch.Generator().manual_seed(2))


def by_trace(kind: Any, rows: Tensor, **more: Any) -> Topology:
    return vanilla(made(kind, itself), "a", **more)


def by_replay(kind: Any, rows: Tensor, **more: Any) -> Topology:
    return vanilla(made(kind, table), "a", example=rows, **more)


def by_hand(kind: Any, rows: Tensor, sent_inputs: tuple[str, ...] = ()) -> Topology:
    whole = made(kind, itself)
    if kind is Affine:
        bottom: nn.Module = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(8, affine=False))
        segments = [
            Segment("bottom", "client", bottom, ("x",), ("z",)),
            Segment("top", "server", whole.b, ("z",), ("out",)),
        ]
    else:
        segments = [
            Segment("bottom", "client", Bottom(whole), ("x",), ("h", "mask")),
            Segment("top", "server", Top(whole), ("h", "mask"), ("out",)),
        ]
    return custom(segments, {"x": "client"}, [Head("out", "server", "client")], sent_inputs=sent_inputs)


WAYS = [by_trace, by_replay, by_hand]


def made(kind: Any, result: Callable[[Tensor], Any]) -> Any:
    with stream(3):
        return kind(result)


def facts_of(topology: Topology, rows: Tensor) -> TopologyFacts:
    return pass_example(topology, dict.fromkeys(topology.inputs, rows[:8]))


def mask_of(topology: Topology, facts: TopologyFacts) -> str:
    (found,) = (v for v in topology.crossings[0].values if facts.origin(v).content is Content.MASK)
    return found


def labels(rows: Tensor) -> Tensor:
    return torch.arange(len(rows)) % 10


@pytest.mark.parametrize("way", WAYS)
def test_an_input_in_disguise_is_refused_unless_it_is_named(way: Callable[..., Topology]) -> None:
    rows = images()
    topology = way(Affine, rows)
    (name,) = topology.inputs
    text = rf"on edge 'bottom->top' carries the input '{name}'.*cut behind a layer.*sent_inputs=\('x',\)"
    with pytest.raises(InvalidInput, match=text):
        facts_of(topology, rows)
    data = sf.data.from_arrays(rows, labels(rows)).clients(1, auxiliary=0, victims=0, validation=0.0, test=0.2)
    with pytest.raises(InvalidInput, match="carries the input"):
        sf.train(topology, data, rounds=1)
    named = way(Affine, rows, sent_inputs=("x",))
    (told,) = facts_of(named, rows).told(named)
    assert str(told) == f"value {told.value!r} on bottom->top (client to server) carries the input '{name}'"
    run = sf.train(named, data, rounds=1)
    assert str(told) in run.ledger.carried
    assert str(told) in str(run.ledger)


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_is_told_and_a_named_input_is_no_mask(way: Callable[..., Topology]) -> None:
    topology = way(Padded, ids())
    (name,) = topology.inputs
    facts = facts_of(topology, ids())
    mask = mask_of(topology, facts)
    (told,) = facts.told(topology)
    said = f"value {mask!r} on bottom->top (client to server) reveals lengths or a mask of {name!r}"
    assert str(told) == said
    assert mask not in facts.returned(topology, topology.crossings[0])
    # No mechanism covers it: it stands open beside a promise, which is no longer one of the whole run.
    (promise,) = (d for key, d in DEFENSES.items() if key == "gaussian_release")
    bare = list(find_exposures(topology, (promise,), (), False))
    assert list(find_exposures(topology, (promise,), (), False, facts)) == [
        *(place for place in bare[:1] if place.startswith("gradients")),
        said,
        *(place for place in bare if place.startswith("labels")),
    ]
    assert said in make_ledger([], 1e-5, find_exposures(topology, (promise,), (), False, facts)).open


@pytest.mark.parametrize("way", thin(WAYS, 2))
def test_a_mask_trains_to_the_bits_of_the_uncut_model_and_is_counted(way: Callable[..., Topology]) -> None:
    topology, whole = way(Padded, ids()), made(Padded, itself)
    engine = engine_of(topology, ids(), labels(ids()), optim=DECAY)
    optimizer, _ = DECAY.build(list(whole.parameters()))
    for chosen in torch.arange(ROWS).split(8):
        engine.train(0, 0, [chosen])
        optimizer.zero_grad()
        functional.cross_entropy(whole(ids()[chosen]), labels(ids())[chosen]).backward()
        optimizer.step()
    state = topology.state_dict(engine.modules(0))
    for name, value in whole.state_dict().items():
        (same,) = (t for key, t in state.items() if key.endswith(name))
        assert torch.equal(same, value), name
    features = 8 * LENGTH * 4
    sizes = {kind: size // 3 for (_, kind, _, _), (_, size) in engine.traffic.counters.items()}
    assert sizes["activation"] == features + 8 * LENGTH * 4
    assert sizes["gradient"] == features
    assert engine.traffic.bytes() == 3 * step_bytes(topology, facts_of(topology, ids()), 8)


@pytest.mark.parametrize("way", WAYS)
def test_a_segment_that_returns_a_mask_passes_the_comparison(way: Callable[..., Topology]) -> None:
    """Its smallest numbers there are leave room for nothing beside them in a sum."""
    topology = way(Padded, ids())
    (name,) = topology.inputs
    check_topology(topology, {name: ids()[:4]})


ACTING = sorted(name for name, defense in DEFENSES.items() if isinstance(defense, (ReleaseDefense, PenaltyDefense)))
"""The defenses of the registry that act on what leaves."""
DECODING = ("adversarial", "channel_pruning")
"""Those that find nothing to reconstruct in token ids."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", thin(ACTING, 6))
def test_every_defense_of_releases_leaves_a_mask_as_it_is(name: str, way: Callable[..., Topology]) -> None:
    defense: Defense = DEFENSES[name]
    topology, rows = way(Padded, ids()).with_task(classification(10)), ids()
    facts = facts_of(topology, rows)
    mask = mask_of(topology, facts)
    if name in DECODING:
        with pytest.raises(InvalidInput, match=r"decoder of real numbers|compares images"):
            defense.check(topology, facts)
        return
    fitted = defense.fit(topology, facts, 0) if isinstance(defense, LayerDefense) else topology
    if name == "latent":
        # Of fewer numbers a row than there, so that each of their bits costs no more.
        defense = replace(defense, epsilon=400.0).calibrate(_terms(fitted, facts))  # type: ignore[call-arg, attr-defined]
    engine = engine_of(fitted, rows, labels(rows), optim=DECAY, defenses=[defense], recording=Recording(("server",)))
    engine.train(0, 0, [torch.arange(8)])
    seen = next(m for m in engine.link.recorders["server"].messages() if m.kind == "activation")
    assert torch.equal(seen.tensors[mask], (rows[:8] == 0) * LOWEST)
    assert seen.dataless == {mask}
    assert mask not in engine.view("server").select(kind="activation").tensors()
    assert all(bool(t.isfinite().all()) for t in fitted.state_dict(engine.modules(0)).values())
    (port,) = (p for plan in segment_plans(fitted, facts, (defense,))["client"] for p in plan.ports_to_others)
    assert port.defended == tuple(v for v in port.values if v != mask)
    if isinstance(defense, Accounted):
        counts = next(party.state.uses.counts for party in engine.parties.values() if party.state.uses.counts)
        assert {int(c.max()) for key, c in counts.items() if key[0] == port.edge} <= {1}


def _terms(topology: Topology, facts: TopologyFacts) -> Any:
    return sf.core.defense.Terms((topology,), (facts,), (), (9,), 3, False, (3,), (1,), lambda *given: 1.0)


def test_nothing_but_masks_is_no_place_for_a_defense() -> None:
    class Masks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x == 0) * LOWEST

    segments = [
        Segment("masks", "client", Masks(), ("x",), ("m",)),
        Segment("top", "server", nn.Linear(LENGTH, 10), ("m",), ("out",)),
    ]
    topology = custom(segments, {"x": "client"}, [Head("out", "server", "client")])
    with pytest.raises(
        InvalidInput, match="Noise finds nothing to act on: edge 'masks->top' carries lengths or a mask"
    ):
        segment_plans(topology, facts_of(topology, ids()), (DEFENSES["noise"],))


def test_a_hop_keeps_what_a_value_is_made_of_and_its_owner_may_see_it() -> None:
    model, rows = made(Affine, table), images()
    chain = multi_hop(model, ("a", "b"), labels="server", example=rows, sent_inputs=("x",))
    told = facts_of(chain, rows).told(chain)
    assert {(one.source, one.target) for one in told} == {("client", "hop1"), ("hop1", "server")}
    assert all(one.what == "carries the input 'x'" for one in told)
    with pytest.raises(InvalidInput, match=r"'hop1->top'|'bottom->hop1'"):
        facts_of(replace(chain, sent_inputs=()), rows)
    # Between two segments of the client nothing crosses.
    ends = u_shaped(made(Affine, table), ("a", "b"), example=rows)
    assert facts_of(ends, rows).told(ends) == ()


def test_places_where_an_input_would_cross_are_not_offered() -> None:
    model, rows = made(Affine, itself), images()
    (place,) = (p for p in cut_places(copy.deepcopy(model), rows) if p.name == "a")
    assert "carries the input 'x'" in (place.refusal or "")
    (named,) = (p for p in cut_places(copy.deepcopy(model), rows, sent_inputs=("x",)) if p.name == "a")
    assert named.possible


def test_unknown_names_of_sent_inputs_are_refused() -> None:
    with pytest.raises(InvalidInput, match="unknown sent input of topology 'custom': 'y'"):
        by_hand(Padded, ids(), sent_inputs=("y",))


class Compared(nn.Module):
    """Weighs features by what `look` makes of whole numbers, which crosses beside them after `a`."""

    def __init__(self, result: Callable[[Tensor], Any], look: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.result, self.look = result, look
        self.register_buffer("table", torch.linspace(-1, 1, WORDS))
        self.words, self.a = nn.Embedding(WORDS + LENGTH, 4), nn.Linear(4 * LENGTH, LENGTH)
        self.b = nn.Linear(LENGTH, 10)

    def forward(self, ids: Tensor) -> Any:
        seen = self.look(ids)
        h = self.a(self.words(ids.expand(-1, LENGTH)).flatten(1))
        weight = seen.float().flatten(1).unflatten(1, (LENGTH, -1)).mean(-1)
        return self.result(self.b(h * weight))


VALUES = torch.arange(WORDS)
REVEALING: dict[str, Callable[[Tensor], Tensor]] = {
    "one_hot": lambda ids: ids[..., None] == VALUES,
    "one_hot_turned_round": lambda ids: ids[..., None] != VALUES,
    "thermometer": lambda ids: ids[..., None] > VALUES,
    "through_a_table": lambda ids: (ids[..., None] == VALUES).float() @ torch.linspace(-1, 1, WORDS),
    "stacked": lambda ids: torch.stack([ids == value for value in range(WORDS)], -1),
    "summed": lambda ids: sum(value * (ids == value) for value in range(WORDS)),  # type: ignore[return-value, misc]
    "bits": lambda ids: torch.stack([(ids >> bit) % 2 == 1 for bit in range(4)], -1),
    "all_but_one_of_four": lambda ids: torch.stack([ids.clamp(max=3) == value for value in range(3)], -1),
}
MARKING: dict[str, Callable[[Tensor], Tensor]] = {
    "padding": lambda ids: ids != 0,
    "padding_and_ends": lambda ids: (ids != 0) & (ids != 1) & (ids.clone() != 2),
    "set_of_words": lambda ids: torch.isin(ids, VALUES[:5]),
    "equal_words": lambda ids: ids[:, None] == ids[:, :, None],
    "two_tensors": lambda ids: ids == torch.tensor(0),
    "lengths": lambda ids: torch.arange(LENGTH) < (ids != 0).sum(1, keepdim=True),
}


@pytest.mark.parametrize("result", [itself, table])
@pytest.mark.parametrize("name", thin([*REVEALING, *MARKING], 3))
def test_comparisons_that_tell_ids_apart_carry_them(name: str, result: Callable[[Tensor], Any]) -> None:
    look, rows = {**REVEALING, **MARKING}[name], ids()
    if name == "all_but_one_of_four":
        rows = rows.clamp(max=3)
    with stream(3):
        model = Compared(result, look)
    topology = vanilla(model, "a", example=rows, sent_inputs=("ids",) if name in REVEALING else None)
    (argument,) = topology.inputs
    (told,) = facts_of(topology, rows).told(topology)
    if name in MARKING:
        assert told.what == f"reveals lengths or a mask of {argument!r}"
        return
    assert told.what == f"carries the input {argument!r}"
    with pytest.raises(InvalidInput, match=rf"carries the input {argument!r}.*sent_inputs"):
        facts_of(replace(topology, sent_inputs=()), rows)


SEVERAL: dict[str, tuple[Callable[[Tensor], list[Tensor]], bool]] = {
    "bits": (lambda ids: [((ids >> bit) & 1) == 1 for bit in range(4)], True),
    "one_value_a_mask": (lambda ids: [ids == value for value in range(WORDS)], True),
    "kinds_of_a_column": (lambda ids: [ids[:, :1] == value for value in range(WORDS)], True),
    "marks": (lambda ids: [ids == value for value in range(4)], False),
    "as_many_marks_as_may_be": (lambda ids: [ids == value for value in range(MANY - 1)], False),
    "one_mark_more": (lambda ids: [ids == value for value in range(MANY)], True),
    "lengths": (lambda ids: [torch.arange(LENGTH) < (ids > k).sum(1, keepdim=True) for k in range(5)], False),
}


@pytest.mark.parametrize("example", [False, True])
@pytest.mark.parametrize("name", SEVERAL)
def test_masks_that_one_party_gets_are_counted_together(name: str, example: bool) -> None:
    look, carries = SEVERAL[name]

    class Several(Compared):
        def forward(self, ids: Tensor) -> Any:
            masks = look(ids)
            h = self.a(self.words(ids).flatten(1))
            for mask in masks:
                h = h + mask.float()
            return self.b(h)

    rows = ids()
    with stream(3):
        model = Several(itself, look)  # type: ignore[arg-type]
    topology = vanilla(model, "a", example=rows if example else None)
    (argument,) = topology.inputs
    if not carries:
        assert {one.origin.content for one in facts_of(topology, rows).told(topology)} == {Content.MASK}
        return
    with pytest.raises(
        InvalidInput, match=rf"carries the input {argument!r}, with \d+ more that server gets.*sent_inputs"
    ):
        facts_of(topology, rows)
    allowed = replace(topology, sent_inputs=(argument,))
    told = facts_of(allowed, rows).told(allowed)
    assert {one.what for one in told} == {f"carries the input {argument!r}"}


def test_a_length_given_as_a_number_a_row_makes_a_mask() -> None:
    counts = torch.arange(ROWS)[:, None] % LENGTH
    with stream(3):
        model = Compared(table, lambda counts: torch.arange(LENGTH) < counts)
    topology = vanilla(model, "a", example=counts)
    (told,) = facts_of(topology, counts).told(topology)
    assert told.what == "reveals lengths or a mask of 'ids'"
    with stream(3):
        model = Compared(table, lambda kinds: torch.arange(LENGTH) == kinds)
    with pytest.raises(InvalidInput, match="carries the input 'ids'"):
        facts_of(vanilla(model, "a", example=counts), counts)
