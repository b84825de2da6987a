"""What DP-SGD refuses, and in which words: numbers, models that mix rows, and runs that cannot be accounted for."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import splitfed
from splitfed.core.defense import Defense
from splitfed.core.errors import InvalidInput
from splitfed.core.example_pass import pass_example
from splitfed.core.optimizers import Optim
from splitfed.core.tasks import Task, classification
from splitfed.core.topology import Head, Segment, Topology
from splitfed.defenses import DistanceCorrelation, DpSgd, Noise
from splitfed.detectors.splitguard import SplitGuard
from splitfed.topologies import u_shaped, vanilla
from tests.examples import InPlaceAfterCut, images, toy_data
from tests.thinning import thin

NUMBERS: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"noise_multiplier": 1.0, "epsilon": 1.0}, "takes a noise_multiplier, or epsilon and delta; give one"),
    "neither": ({}, "takes a noise_multiplier, or epsilon and delta; give one"),
    "no delta": ({"epsilon": 1.0}, "dp_sgd epsilon needs a delta"),
    "negative noise": ({"noise_multiplier": -1.0}, "dp_sgd noise_multiplier=-1.0 is not allowed"),
    "no norm": ({"noise_multiplier": 1.0, "max_norm": 0.0}, "dp_sgd max_norm=0.0 is not allowed"),
    "no norm of a role": (
        {"noise_multiplier": 1.0, "max_norm": {"client": -1.0}},
        "dp_sgd max_norm of 'client'=-1.0 is not allowed",
    ),
    "clip": ({"noise_multiplier": 1.0, "clip": "jiont"}, "unknown clip 'jiont'; did you mean 'joint'"),
    "joint table": (
        {"noise_multiplier": 1.0, "clip": "joint", "max_norm": {"client": 1.0}},
        "with clip='joint' has one max_norm for all roles",
    ),
    "accountant": ({"noise_multiplier": 1.0, "accountant": "rpd"}, "unknown accountant 'rpd'; did you mean 'rdp'"),
    "no roles": (
        {"noise_multiplier": 1.0, "roles": None},
        "dp_sgd roles=None is not allowed; expected a tuple",
    ),
    "one role": ({"noise_multiplier": 1.0, "roles": "client"}, "roles='client' is not allowed; expected a list"),
    "edge": ({"noise_multiplier": 1.0, "on": ("a->b",)}, "guards weights, no edge: on=('a->b',) is not allowed"),
    "delta": ({"epsilon": 1.0, "delta": 1.0}, "dp_sgd delta=1.0 is not allowed"),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_numbers(case: str) -> None:
    arguments, text = NUMBERS[case]
    with pytest.raises(InvalidInput, match=re.escape(text)):
        DpSgd(**arguments)


class Centred(nn.Module):
    """Subtracts the batch's mean: no known type, but it mixes rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Folded(nn.Module):
    """A layer that sees every row several times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.reshape(-1, 4)).reshape(len(x), -1)


class Loose(nn.Module):
    """A module with a layer inside it and a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(())), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale)


class Averaging(nn.Module):
    """Keeps a running mean of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


def chain(middle: nn.Module, width: int = 8) -> Topology:
    """Pieces as they are: `cut` would trace them, and name the parts of unknown modules otherwise."""
    bottom = Segment("bottom", "client", nn.Sequential(nn.Flatten(), nn.Linear(64, 8)), ("x",), ("z",))
    top = Segment("top", "server", nn.Sequential(middle, nn.Linear(width, 10)), ("z",), ("out",))
    return Topology("chain", (bottom, top), {"x": "client"}, (Head("out", "server", "client"),))


def circular() -> nn.Module:
    convolution = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")
    return nn.Sequential(nn.Unflatten(1, (1, 2, 4)), convolution, nn.Flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (lambda: nn.BatchNorm1d(8), "cannot train beside batch norm '0' of segment 'top': it mixes the rows"),
    "mixing": (Centred, "cannot train beside segment 'top': it mixes the rows of a batch in "),
    "folded": (Folded, "layer '0.inner' (Linear) of segment 'top': its input has no row for each row of the batch"),
    "padding": (circular, "(Conv2d) of segment 'top': the gradient of weight "),
    "experts": (
        lambda: Experts(),
        "(Linear) of segment 'top': its input has no row for each row of the batch; give it all",
    ),
    "positions": (
        lambda: Places(flat=True),
        "row for each row of the batch; give it one row for all, as torch.arange(n).u",
    ),
    "dropped": (lambda: Places(drop=0.5), "it computes one row for all, which is not used equally for each; freeze it"),
    "token": (
        lambda: Token(0.5),
        "(Token) of segment 'top': the gradient of weight '0.first' row by row is unknown; set t",
    ),
    "attention": (lambda: Attending(), "layer '0.attention' (MultiheadAttention) of segment 'top': "),
}


class Attending(nn.Module):
    """Attention uses the weights of a layer inside it without calling that layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(-1, 2, 4)
        return self.attention(h, h, h, need_weights=False)[0].flatten(1)


class Experts(nn.Module):
    """Each expert gets the rows that are sent to it, or, `dense`, all rows."""

    def __init__(self, dense: bool = False) -> None:
        super().__init__()
        self.dense, self.experts = dense, nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, z: Tensor) -> Tensor:
        first, out = z[:, 0] > 0, torch.zeros_like(z)
        for mine, expert in zip((first, ~first), self.experts, strict=True):
            place = mine.nonzero().flatten()
            out = out + mine[:, None] * expert(z) if self.dense else out.index_add(0, place, expert(z[place]))
        return out


class Places(nn.Module):
    """Adds what is learnt of each of four positions: of numbers (1, 4), or (4,) as `flat`."""

    def __init__(self, flat: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.place, self.flat, self.drop = nn.Embedding(4, 2), flat, nn.Dropout(drop)

    def forward(self, z: Tensor) -> Tensor:
        numbers = torch.arange(4)
        return (z.view(-1, 4, 2) + self.drop(self.place(numbers if self.flat else numbers[None]))).flatten(1)


class Token(nn.Module):
    """A weight of its own beside every row, and dropout of both."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.first, self.drop = nn.Parameter(torch.randn(1, 4)), nn.Dropout(drop)

    def forward(self, z: Tensor) -> Tensor:
        dropped: Tensor = self.drop(torch.cat([self.first.expand(len(z), -1), z[:, :4]], 1))
        return dropped


@pytest.mark.parametrize("make", [lambda: Experts(dense=True), Places, lambda: Token(0.0)])
def test_what_a_refusal_advises_is_accepted(make: Callable[[], nn.Module]) -> None:
    checked(chain(make()))


@pytest.mark.parametrize("case", ["experts", "positions", "dropped", "token"])
def test_frozen_it_is_accepted(case: str) -> None:
    checked(chain(MODELS[case][0]().requires_grad_(False)))


def checked(topology: Topology, defense: DpSgd | None = None) -> None:
    x, _ = images(8)
    ready = topology.with_task(classification(10))
    (defense or DpSgd(noise_multiplier=1.0)).check(ready, pass_example(ready, {next(iter(ready.inputs)): x}))


@pytest.mark.parametrize("case", MODELS)
def test_models_that_give_a_row_no_gradient_of_its_own(case: str) -> None:
    factory, text = MODELS[case]
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        checked(chain(factory(), 4 if case == "folded" else 8))
    assert "\n" not in str(caught.value)


def test_state_that_takes_in_rows() -> None:
    text = "cannot train segment 'top': its state '0.mean' is updated from the rows without noise"
    with pytest.raises(InvalidInput, match=text):
        checked(chain(Averaging()))


def test_batch_norm_is_refused_at_an_unguarded_party_too() -> None:
    """The rows of the gradient that it sends back are nobody's own."""
    with pytest.raises(InvalidInput, match="batch norm '0' of segment 'top'"):
        checked(chain(nn.BatchNorm1d(8)), DpSgd(noise_multiplier=1.0, roles=("client",)))


def test_batch_norm_in_evaluation_mode_is_none() -> None:
    checked(chain(nn.BatchNorm1d(8).eval()))


def test_a_weight_beside_a_layer_is_understood() -> None:
    """The sums that are compared are not zero, so a weight that was overlooked would be refused."""
    checked(chain(Loose()))


def test_replaced_batch_norm_is_said_and_trained() -> None:
    topology, x = chain(nn.BatchNorm1d(8)).with_task(classification(10)), images(8)[0]
    defense = DpSgd(noise_multiplier=1.0, replace=True)
    with pytest.warns(UserWarning, match="dp_sgd replaced 0 of top: BatchNorm1d by GroupNorm"):
        made = defense.fit(topology, pass_example(topology, {"x": x}), 0)
    assert isinstance(made.segment("top").module.get_submodule("0"), nn.GroupNorm)
    assert isinstance(topology.segment("top").module.get_submodule("0"), nn.BatchNorm1d)
    checked(made, defense)
    assert defense.fit(made, pass_example(made, {"x": x}), 0) is made


def train_chain(middle: nn.Module, sampling: str, **given: Any) -> splitfed.Run:
    """Batches of 8 of 33 rows, so that one row is left over, or of any size."""
    data = toy_data(47).clients(1, auxiliary=10, victims=4, validation=0, test=0)
    local, defense = splitfed.LocalUpdate(sampling=sampling), DpSgd(noise_multiplier=1.0, **given)
    return splitfed.train(chain(middle), data, rounds=1, batch_size=8, defenses=defense, local=local)


class OwnNorm(nn.BatchNorm1d):
    """Another class, which Opacus has no substitute for."""


@pytest.mark.parametrize("sampling", thin(["poisson", "shuffle"], 2))
def test_every_way_out_of_batch_norm_trains(sampling: str) -> None:
    refused = "batch norm '0' of segment 'top': it mixes the rows of a batch, whatever its party; "
    way = refused + "replace=True puts group norm there, or put it in evaluation mode"
    with pytest.raises(InvalidInput, match=re.escape(way)):
        train_chain(nn.BatchNorm1d(8), sampling)
    with pytest.warns(UserWarning, match="dp_sgd replaced 0 of top: BatchNorm1d by GroupNorm"):
        assert train_chain(nn.BatchNorm1d(8), sampling, replace=True).ledger.totals
    assert train_chain(nn.BatchNorm1d(8).eval(), sampling).ledger.totals
    assert train_chain(nn.BatchNorm1d(8).eval(), sampling, replace=True).ledger.totals
    for replace_it in (False, True):
        with pytest.raises(
            InvalidInput, match=re.escape(refused + "put group norm there, or put it in evaluation mode")
        ):
            train_chain(OwnNorm(8), sampling, replace=replace_it)
    assert train_chain(OwnNorm(8).eval(), sampling).ledger.totals
    # Without statistics it mixes rows in evaluation mode too.
    bare = nn.BatchNorm1d(8, track_running_stats=False).eval()
    with pytest.raises(InvalidInput, match="replace=True puts group norm there, or take it out"):
        train_chain(bare, sampling)


@pytest.mark.parametrize(
    ("way", "cut"), thin(itertools.product(["replace", "evaluation mode"], ["first", "norms.0"]), 3)
)
def test_so_does_that_of_a_segment_cut_by_replay(way: str, cut: str) -> None:
    """Each party has the places of the other's layers, which hold nothing."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 8), nn.Linear(8, 10)
            self.norms = nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(10)])

        def forward(self, x: Tensor) -> Tensor:
            if len(x.shape) > 9:
                x = x[0]
            found: Tensor = self.norms[1](self.second(torch.relu(self.norms[0](self.first(x.flatten(1))))))
            return found

    model = Branching()
    model.norms.train(way == "replace")
    topology, data = vanilla(model, cut, example=images(8)[0]), toy_data(47).clients(1, auxiliary=10, victims=4)
    defense = DpSgd(noise_multiplier=1.0, replace=way == "replace")
    local = splitfed.LocalUpdate(sampling="poisson")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run = splitfed.train(topology, data, rounds=1, batch_size=8, defenses=defense, local=local)
    assert run.ledger.totals
    who = {"first": "top", "norms.0": "bottom"}[cut]
    text = f"dp_sgd replaced norms.0 of {who}: BatchNorm1d by GroupNorm, norms.1 of top: BatchNorm1d by GroupNorm"
    assert [str(one.message) for one in said] == ([text] if way == "replace" else [])


def sequence(inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 4)), inner, nn.Flatten())


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (lambda: nn.InstanceNorm1d(2, track_running_stats=True), "replace=True takes its statistics out"),
        (lambda: First(nn.LSTM(4, 4, batch_first=True)), "replace=True puts DPLSTM there, or freeze it"),
    ],
    ids=["instance norm", "lstm"],
)
def test_what_has_a_substitute_names_it(make: Callable[[], nn.Module], way: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(f"; {way}")):
        train_chain(sequence(make()), "poisson")
    with pytest.warns(UserWarning, match="dp_sgd replaced"):
        assert train_chain(sequence(make()), "poisson", replace=True).ledger.totals


class First(nn.Module):
    """The first result of a layer that returns several."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)[0]
        return found


def test_an_untracked_instance_norm_stays(recwarn: pytest.WarningsRecorder) -> None:
    assert train_chain(sequence(nn.InstanceNorm1d(2)), "poisson", replace=True).ledger.totals
    assert not recwarn


def test_a_loss_that_mixes_rows() -> None:
    def spread(output: Tensor, y: Tensor) -> Tensor:
        return output.std()

    topology = chain(nn.Tanh()).with_task(Task("spread", spread, lambda o, y: 0.0, "none", None))
    x, _ = images(8)
    with pytest.raises(InvalidInput, match="needs a loss that is the mean over the rows; that of 'spread' is not"):
        DpSgd(noise_multiplier=1.0).check(topology, pass_example(topology, {next(iter(topology.inputs)): x}))


def test_a_loss_that_weighs_classes_by_the_batch() -> None:
    """Cross-entropy with class weights divides by the weights of all labels of the batch."""

    def weighed(output: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, y, torch.tensor([1.0, 5.0, *[1.0] * 8])[: output.shape[1]])

    task = classification(10)
    topology = vanilla(InPlaceAfterCut(), "pool").with_task(replace(task, loss=weighed))
    x, _ = images(8)
    with pytest.raises(InvalidInput, match="needs a loss that is the mean over the rows; that of 'classification' is"):
        DpSgd(noise_multiplier=1.0).check(topology, pass_example(topology, {next(iter(topology.inputs)): x}))


def test_roles() -> None:
    topology = u_shaped(InPlaceAfterCut(), ("pool", "fc1"))
    with pytest.raises(InvalidInput, match="unknown role of dp_sgd 'sever'; did you mean 'server'"):
        DpSgd(noise_multiplier=1.0, roles=("sever",)).guards(topology)
    with pytest.raises(InvalidInput, match="unknown role in dp_sgd max_norm: 'server'"):
        checked(topology, DpSgd(noise_multiplier=1.0, max_norm={"client": 1.0}))
    frozen = vanilla(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), "0")
    with pytest.raises(InvalidInput, match="cannot guard role 'client': it has no weight that learns"):
        DpSgd(noise_multiplier=1.0, roles=("client",)).guards(frozen)


def go(*defenses: Defense, **options: Any) -> splitfed.Run:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = InPlaceAfterCut()
    data = toy_data(100).clients(2, auxiliary=10, victims=10)
    return splitfed.train(
        vanilla(model, "pool"),
        data,
        **{"defenses": defenses, "rounds": 1, "batch_size": 10, "optimizer": Optim("SGD", {"lr": 0.1}), **options},
    )


PRIVATE = DpSgd(noise_multiplier=1.0)
RUNS: dict[str, tuple[tuple[Defense, ...], dict[str, Any], str]] = {
    "blind": (
        (PRIVATE,),
        {"schedule": "blind"},
        "cannot be accounted for with schedule Blind: its steps take",
    ),
    "sglr": ((PRIVATE,), {"schedule": "sglr"}, "cannot be accounted for with schedule Sglr: its steps take the rows"),
    "nopeek": (
        (PRIVATE, DistanceCorrelation(0.5)),
        {},
        "cannot stand beside DistanceCorrelation: its penalty may mix the rows of a batch",
    ),
    "relative noise": (
        (Noise(relative=True), PRIVATE),
        {},
        "cannot stand beside Noise: its release mixes the rows of a batch on",
    ),
    "two": ((PRIVATE, DpSgd(noise_multiplier=2.0)), {}, "the weights of role 'client' have two guards"),
    "a part": (
        (DpSgd(epsilon=1.0, delta=1e-3, roles=("server",)),),
        {},
        "epsilon=1 cannot be guaranteed: the weights of role 'client' learn from the same rows unguarded",
    ),
    "detector": (
        (PRIVATE,),
        {"adversaries": splitfed.Adversaries(detectors={"client": SplitGuard()})},
        "cannot be accounted for with detectors, which train on rows of their own choice",
    ),
    "poisson and blind": (
        (),
        {"schedule": "blind", "local": splitfed.LocalUpdate(sampling="poisson")},
        "'poisson' is not allowed with Blind",
    ),
    "poisson and a minimum": (
        (DistanceCorrelation(0.5, statistic="unbiased"),),
        {"local": splitfed.LocalUpdate(sampling="poisson")},
        "sampling='poisson' may draw a batch of any size, and DistanceCorrelation needs 4 rows or more",
    ),
}


@pytest.mark.parametrize("case", RUNS)
def test_runs(case: str) -> None:
    defenses, options, text = RUNS[case]
    with pytest.raises(InvalidInput, match=re.escape(text)) as caught:
        go(*defenses, **options)
    assert "\n" not in str(caught.value)


def test_plain_noise_may_stand_beside_it() -> None:
    assert len(go(Noise(scale=0.1), PRIVATE).history) == 1


def test_rows_of_two_clients_in_one_step_are_refused_where_nobody_settled() -> None:
    run = go(PRIVATE)
    with pytest.raises(InvalidInput, match="one step would take the rows of several clients"):
        run.engine.train_together(5, 0, {0: torch.arange(4), 1: torch.arange(4)}, {0: 0.5, 1: 0.5})
