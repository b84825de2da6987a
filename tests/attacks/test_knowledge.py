"""One table says of every field of `Knowledge` who is shown it; what an attack gets and is refused follows from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from splitfed.attacks.base import Attack, Knowledge, Needs, Progress
from splitfed.attacks.knowledge import IN_VIEW, Access, access_table, granted, public
from splitfed.attacks.threat_model import Target
from splitfed.core.messages import Message, Stamp, View
from splitfed.threats.dry_run import AttackBegun, stop_at_first_use

TABLE = access_table(Knowledge)
EMPTY = View("server", ())


class Learnt:
    """Stands for what a training attack has learnt."""

    plan: Any = None

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def predict(self, view: View, target: Target) -> Tensor:
        raise NotImplementedError

    def copy(self) -> Any:
        return Learnt(self.number + 1)


def held_by(knowledge: Knowledge) -> dict[str, int]:
    """Return which object every field holds: tensors cannot be compared otherwise."""
    return {name: id(getattr(knowledge, name)) for name in TABLE}


def full() -> Knowledge:
    """Return knowledge in which every field holds something."""
    rows = torch.ones(2, 3)
    plain = {"shape": (3,), "value_range": (0.0, 1.0), "device": torch.device("cpu"), "classes": 2}
    tensors = dict.fromkeys(("auxiliary", "auxiliary_labels", "candidates", "candidate_labels"), rows)
    mappings = {name: {"x": rows} for name in ("own", "own_auxiliary", "hints", "places")}
    records = {
        "attributes": {"odd": (rows, 2)},
        "origins": {"z": ("x",)},
        "local": Learnt(),
        "exchanged": Learnt(),
        "public_scores": Learnt(),
        "training_attack": Learnt(),
    }
    given = {**plain, **tensors, **mappings, **records}
    made: Any = Knowledge
    return made(**given, **{name: nn.Identity() for name in TABLE if name not in given})


def test_every_field_says_who_is_shown_it() -> None:
    assert list(TABLE) == [f.name for f in dataclasses.fields(Knowledge)]
    assert all(isinstance(access, Access) for access in TABLE.values())
    told = {need for access in TABLE.values() if access.present is not None for need in access.needs}
    assert told | set(IN_VIEW) == set(Needs), "of every need it must be known whether it is granted"


def test_a_field_that_does_not_say_so_is_refused() -> None:
    @dataclass(frozen=True)
    class More(Knowledge):
        secret: Tensor | None = None

    with pytest.raises(TypeError, match=r"More\.secret has no access rule"):
        access_table(More)
    for use in (lambda k: k.only(frozenset()), lambda k: k.copy(), lambda k: k.missing(frozenset(), EMPTY)):
        with pytest.raises(TypeError, match=r"More\.secret"):
            use(More((3,)))


def test_a_new_field_is_hidden_copied_and_asked_for_like_the_others() -> None:
    @dataclass(frozen=True)
    class More(Knowledge):
        secret: Tensor | None = field(default=None, metadata=granted(Needs.HEAD, copy=torch.clone))
        note: str = field(default="", metadata=public())

    more = More((3,), head=nn.Identity, secret=torch.ones(2), note="seen")
    shown = more.only(frozenset({Needs.QUERIES}))
    assert isinstance(shown, More)
    assert (shown.secret, shown.head, shown.note) == (None, None, "seen")
    held = more.only(frozenset({Needs.HEAD})).copy()
    assert isinstance(held, More)
    assert held.secret is not None
    assert more.secret is not None
    assert held.secret.data_ptr() != more.secret.data_ptr()
    assert dataclasses.replace(more, secret=None).missing(frozenset({Needs.HEAD}), EMPTY) == [str(Needs.HEAD)]


@pytest.mark.parametrize("need", Needs)
def test_one_need_shows_its_own_fields_alone(need: Needs) -> None:
    knowledge = full()
    shown = knowledge.only(frozenset({need}))
    for name, access in TABLE.items():
        assert (getattr(shown, name) is getattr(knowledge, name)) == (access.needs <= {need}), name
    everything = frozenset(Needs)
    assert held_by(knowledge.only(everything)) == held_by(knowledge)
    assert not knowledge.missing(everything - set(IN_VIEW), EMPTY)
    lacking = Knowledge((3,)).missing(frozenset({need}), EMPTY)
    assert lacking == [str(need)]


def test_what_is_missing_comes_in_the_order_of_the_needs() -> None:
    assert Knowledge((3,)).missing(frozenset(Needs), EMPTY) == [str(need) for need in Needs]
    assert full().only(frozenset(Needs) - {Needs.QUERIES, Needs.OWN_INPUTS}).missing(
        frozenset(Needs) - set(IN_VIEW), EMPTY
    ) == [str(Needs.QUERIES), str(Needs.OWN_INPUTS)]
    none = dataclasses.replace(full(), auxiliary=torch.zeros(0, 3), attributes={})
    assert none.missing(frozenset(Needs) - set(IN_VIEW), EMPTY) == [str(Needs.AUXILIARY), str(Needs.ATTRIBUTES)]
    stamp = Stamp("train", 0, 0, 0)
    upload = View("fed", (Message("client0", "fed", "prototype", None, {}, stamp),))
    assert Knowledge((3,)).missing(frozenset({Needs.UPLOADS, Needs.RELEASES}), upload) == [str(Needs.RELEASES)]
    weights = View("fed", (Message("client0", "fed", "weights", None, {}, stamp),))
    assert Knowledge((3,)).missing(frozenset({Needs.UPDATES}), weights) == [str(Needs.UPDATES)]
    assert not full().missing(frozenset({Needs.UPDATES}), weights)


@pytest.mark.parametrize("need", Needs)
def test_nothing_that_is_not_required_reaches_the_attack(need: Needs) -> None:
    seen: list[Knowledge] = []

    @dataclass(frozen=True)
    class Nosy(Attack):
        requires: ClassVar[frozenset[Needs]] = frozenset({need})

        def run(self, view: View, knowledge: Knowledge, generator: torch.Generator, progress: Progress) -> Tensor:
            seen.append(knowledge)
            return torch.zeros(1, 3)

    stamp = Stamp("train", 0, 0, 0)
    kinds = ("activation", "gradient", "weights", "prototype")
    view = View("server", tuple(Message("client0", "server", kind, None, {}, stamp) for kind in kinds))
    Nosy()(view, full(), torch.Generator())
    (shown,) = seen
    for name, access in TABLE.items():
        if not access.needs <= {need}:
            assert not getattr(shown, name), name


def test_copies_share_no_memory() -> None:
    knowledge = full()
    held = knowledge.copy()
    for name, access in TABLE.items():
        value = getattr(knowledge, name)
        assert (access.copy is None) == (getattr(held, name) is value), name
        if isinstance(value, Tensor):
            assert getattr(held, name).data_ptr() != value.data_ptr()
    assert isinstance(held.training_attack, Learnt)
    assert held.training_attack.number == 1


def test_all_that_computes_ends_a_dry_run() -> None:
    class Drawn(nn.Module):
        defenses, least_rows = None, 1

        def modules(self) -> Any:
            return iter(())

    idle = stop_at_first_use(dataclasses.replace(full(), architecture=lambda seed: Drawn()))
    x = torch.zeros(1, 3)
    begin = {name: getattr(idle, name) for name, access in TABLE.items() if access.computes}
    begin["architecture"] = begin["architecture"](0)
    begin["training_attack"] = lambda x, state=begin["training_attack"]: state.copy().predict(EMPTY, Target.INPUTS)
    for first_use in begin.values():
        with pytest.raises(AttackBegun):
            first_use(x)
    assert held_by(stop_at_first_use(nothing := Knowledge((3,)))) == held_by(nothing)


def test_knowledge_is_equal_to_itself_alone() -> None:
    """Python 3.13 compares fields one by one, and a tensor is no truth value."""
    knowledge = full()
    assert knowledge == knowledge
    assert knowledge != dataclasses.replace(knowledge)
