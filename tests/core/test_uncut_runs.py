"""One run of the uncut model for all places: the same listing as with a run for each, and no weaker a proof."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from splitfed.core import equivalence, weight_sharing
from splitfed.core.cut_places import CutPlace, cut_places
from splitfed.core.equivalence import FEW_STAGES, STAGES
from splitfed.core.equivalence_sides import Parties, StepResult, Uncut
from splitfed.core.uncut_runs import UncutRuns
from tests.core.cut_idioms import Counting, CountingInGlobal, Net, ends, without_gradients
from tests.core.test_cut_places import Repeated, Stopped, Tied, residual, seeded
from tests.core.test_replay import Gated, encoder, words
from tests.examples import images
from tests.thinning import thin

TABLES: dict[int, Tensor] = {}


class Cached(Net):
    """Keeps a table that its first call makes."""

    table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(8.0)
        return self.c(torch.relu(self.b(torch.relu(self.a(x)) + self.table)))


class CachedInGlobal(Net):
    """Keeps a table for all models of its class."""

    def forward(self, x: Tensor) -> Tensor:
        table = TABLES.setdefault(x.shape[1], torch.arange(8.0))
        return self.c(torch.relu(self.b(torch.relu(self.a(x)) + table)))


class NotFinite(Net):
    """Its gradients are no numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.sqrt(self.b(self.a(x)) * 0.0))


class Clamps(Net):
    """Writes into its weights in the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.weight.clamp_(-0.1, 0.1)
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))


def norms() -> nn.Module:
    """Return layers with buffers and draws."""
    return nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
    )


def eights() -> Tensor:
    return torch.rand(8, 8, generator=torch.Generator().manual_seed(0))


LISTED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "norms": (norms, eights),
    "residual": (residual, lambda: images(8)[0]),
    "called twice": (Repeated, lambda: eights()[:, :4]),
    "tied": (Tied, lambda: eights()[:, :6]),
    "raw": (lambda: Stopped(raw=True), lambda: eights()[:, :4]),
    "replayed": (Gated, lambda: images(8)[0]),
    "tables": (lambda: encoder(blocks=1), lambda: {"words": words(8)}),
    "counting": (lambda: Counting(ends, steps=0), eights),
    "counting in a global": (lambda: CountingInGlobal(ends), eights),
    "cached": (lambda: Cached(ends), eights),
    "not finite": (lambda: NotFinite(ends), eights),
    "writes": (lambda: Clamps(ends), eights),
    "no gradients": (lambda: Net(without_gradients), eights),
}
SLOW = ("tables", "called twice")


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let every model be what the test is run for."""
    size: str = request.param
    if size == "large":
        monkeypatch.setattr(weight_sharing, "LARGE", 0)
    return size


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return what every comparison with a run that is kept has come to."""
    found: list[bool] = []
    same = equivalence._same_as_recorded

    def noted(*given: Any) -> bool:
        found.append(same(*given))
        return found[-1]

    monkeypatch.setattr(equivalence, "_same_as_recorded", noted)
    return found


@pytest.mark.filterwarnings("ignore:.*was compared with its cut model for")
@pytest.mark.parametrize("case", thin([c for c in LISTED if c not in SLOW] + list(SLOW), 8))
def test_the_listing_is_that_of_a_run_for_each_place(
    case: str, size: str, compared: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    make, rows = LISTED[case]
    model = seeded(make)
    found = cut_places(model, rows())
    # Nothing is kept of these.
    kept = case not in ("counting", "counting in a global", "not finite") and (case, size) != ("writes", "large")
    assert any(compared) == kept
    monkeypatch.setattr(UncutRuns, "find", lambda *_: None)
    assert cut_places(model, rows()) == found


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the modes of all batches that the uncut model has run."""
    found: list[str] = []
    run = Uncut.run

    def noted(self: Uncut, stage: str, *given: Any) -> StepResult:
        found.append(stage)
        return run(self, stage, *given)

    monkeypatch.setattr(Uncut, "run", noted)
    return found


def test_the_uncut_model_runs_once_for_all_places(size: str, ran: list[str]) -> None:
    places = cut_places(seeded(norms), eights())
    assert [place.possible for place in places] == [True] * 5 + [False]
    assert ran == [stage for stage, _ in (STAGES if size == "small" else FEW_STAGES)]


def test_where_parties_leave_something_in_a_global_the_uncut_model_runs_beside_them(
    compared: list[bool], ran: list[str]
) -> None:
    places = cut_places(seeded(lambda: CachedInGlobal(ends)), eights())
    assert [place.possible for place in places] == [True, True, False]
    assert all(compared)
    assert ran.count("training") > len(compared) * [stage for stage, _ in STAGES].count("training")
    assert not TABLES


def shifted(values: dict[str, Any], name: str) -> None:
    values[name] = values[name] + 2.0**-20


def first(result: StepResult) -> str:
    return next(iter(result.outputs))


DAMAGES: dict[str, tuple[Callable[[StepResult], object], str]] = {
    "output": (lambda r: shifted(r.outputs, first(r)), "differs by up to"),
    "detached output": (lambda r: r.attached.update({first(r): False}), "has no gradient"),
    "gradient": (lambda r: shifted(r.gradients, "0.weight"), "the gradient of weight '0.weight' differs"),
    "no gradient": (lambda r: r.gradients.pop("5.bias"), "weight '5.bias' gets no gradient"),
    "weight": (lambda r: r.state.update({"3.weight": torch.ones(8, 8)}), "'3.weight' is another after the step"),
    "missing": (lambda r: r.state.pop("3.bias"), "the state has no '3.bias'"),
    "buffer": (
        lambda r: r.copies.append(("piece0", "1.running_mean", torch.ones(8))),
        "buffer '1.running_mean' in 'piece0' is another",
    ),
    "mode": (lambda r: r.modes.update({"2": not r.modes["2"]}), "submodule '2' is not in"),
    "draws": (
        lambda r: object.__setattr__(r, "generators", (torch.zeros(9, dtype=torch.uint8), *r.generators[1:])),
        "other random numbers are drawn from torch",
    ),
}


@pytest.mark.parametrize("damage", thin(DAMAGES, 3))
def test_a_broken_place_among_others_is_found_in_the_last_batch(
    damage: str, size: str, compared: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    act, text = DAMAGES[damage]
    stages = [stage for stage, _ in (STAGES if size == "small" else FEW_STAGES)]
    # A large model's evaluation knows of no gradients.
    learns = damage in ("gradient", "no gradient", "detached output")
    last = max(i for i, stage in enumerate(stages) if stage == "training" or not learns)
    run = Parties.run

    def broken(self: Parties, stage: str, inputs: Any, targets: Any, step: int) -> StepResult:
        result = run(self, stage, inputs, targets, step)
        held = {name for name, _ in self._modules["piece0"].named_parameters()}
        if step == last and "3.weight" in held and "4.weight" not in held:
            act(result)
        return result

    monkeypatch.setattr(Parties, "run", broken)
    places: tuple[CutPlace, ...] = cut_places(seeded(norms), eights())
    refused = {place.name: place.refusal for place in places if not place.possible}
    assert list(refused) == ["3", "5"]
    assert text in str(refused["3"])
    assert "'3' is another model than the uncut one" in str(refused["3"])
    # By trace and by replay.
    assert compared == [True, True, True, False, False, True]
