"""The contract of methods is narrow, methods are flat, and hooks of the release before are taken or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from splitfed.core.errors import InvalidInput
from splitfed.federated import Learner, Method, MethodTraits
from splitfed.federated.base import _TRAITS
from splitfed.registry import TABLES, load
from splitfed.schedules import Blind
from splitfed.topologies import local, vanilla
from tests.examples import import_from_contributing
from tests.federated.examples import go, model, weights

MOST = 12


def public(kind: type) -> list[str]:
    """The methods and properties that a class has itself."""
    return [name for name, one in vars(kind).items() if not name.startswith("_") and (callable(one) or _property(one))]


def _property(one: object) -> bool:
    return isinstance(one, (property, classmethod, staticmethod))


def test_a_method_has_twelve_public_members_and_no_more() -> None:
    assert len(public(Method)) == MOST


@pytest.mark.parametrize("name", TABLES["methods"])
def test_methods_are_small_and_flat(name: str) -> None:
    """At most one class stands between a method and the contract."""
    *above, contract, _ = load("methods", name).__mro__
    assert contract is Method
    assert len(above) <= 2
    assert all(len(public(kind)) <= MOST for kind in above)


def test_a_method_says_by_itself_that_it_trains_in_steps_of_its_own() -> None:
    class Own(Method):
        def train(self, learner: Learner, epoch: int, batches: Sequence[Any], first: int) -> list[float]:
            return learner.train(epoch, batches, first)

    class Adds(Method):
        def objective(self, placement: Any) -> None:
            return None

    topology = local(model())
    assert Method().traits(topology) == MethodTraits()
    assert Own().traits(topology) == MethodTraits(own_steps=True, plain_update=False)
    assert Adds().traits(topology) == MethodTraits(plain_update=False)


def test_aggregate_under_its_old_name() -> None:
    with pytest.warns(DeprecationWarning, match="Sums.fuse is now aggregate"):

        @dataclass(frozen=True, kw_only=True)
        class Sums(Method):
            def fuse(self, learners: Sequence[Learner], shares: Mapping[int, float], number: int, state: Any) -> None:
                state["clients"] = [learner.replica for learner in learners]

    run = go(Sums(), 1)
    assert run.method_state == {"clients": [0, 1, 2]}
    assert weights(run, 0)


def test_every_old_trait_is_taken() -> None:
    """As a property, or as a method of the topology; what a class above says stays where it says nothing else."""
    assert set(_TRAITS.values()) <= {one.name for one in fields(MethodTraits)}
    topology = vanilla(model(), "relu")
    with pytest.warns(DeprecationWarning, match="of what traits returns") as warned:

        class Old(Method):
            leads = True

            @property
            def fuses(self) -> bool:
                return True

            def kept(self, topology: Any) -> tuple[str, ...]:
                return (topology.segments[0].name,)

            def traits(self, topology: Any) -> MethodTraits:
                return replace(super().traits(topology), reads_labels=True)

    assert sorted(str(one.message).split(";")[0] for one in warned) == [
        "Old.fuses is now aggregates_weights of what traits returns",
        "Old.kept is now private_segments of what traits returns",
        "Old.leads is now own_steps of what traits returns",
    ]
    expected = MethodTraits(
        own_steps=True, aggregates_weights=True, reads_labels=True, private_segments=(topology.segments[0].name,)
    )
    assert Old().traits(topology) == expected

    class Below(Old):
        def traits(self, topology: Any) -> MethodTraits:
            return replace(super().traits(topology), own_steps=False)

    assert Below().traits(topology) == replace(expected, own_steps=False)
    with pytest.raises(InvalidInput, match="method Old leads each client's training, and schedule Blind"):
        go(Old(), schedule=Blind(), topology=topology)


@pytest.mark.parametrize(
    ("old", "told"),
    [("check_together", "topologies, facts and bound"), ("check_public", "public"), ("check_optimizers", "optimizers")],
)
def test_an_old_check_is_refused_where_it_is_written(old: str, told: str) -> None:
    """Else it would refuse nothing, without a word."""
    text = f"method Mine has {old!r}, which nobody calls; expected check_run(context), where context has {told}"
    with pytest.raises(InvalidInput) as caught:
        type("Mine", (Method,), {old: lambda self, *given: None})
    assert str(caught.value) == text


def test_the_method_of_the_contributing_page_averages_heads_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = import_from_contributing("head_average", tmp_path, monkeypatch).HeadAverage
    run = go(kind(), 1)
    held = [weights(run, replica) for replica in range(3)]
    names = {name for name in held[0] if not torch.equal(held[0][name], held[1][name])}
    assert names >= {"body/fc1.weight", "head/fc2.weight"}
    assert set(run.method_state["weights"]) == {"head/fc2.weight", "head/fc2.bias"}
    assert kind().traits(local(model())).turned_off == "head_average of one segment is fedavg"
    newest = run.method.newest(run.learners[0], run.method_state)  # type: ignore[union-attr]
    assert newest is run.method_state["weights"]
