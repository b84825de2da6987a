"""The contract of methods is narrow, methods are flat, and hooks of the release before are taken or refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from splitfed.federated import Learner, Method, MethodTraits
from splitfed.registry import TABLES, load
from splitfed.topologies import local
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
