"""Small runs under one effect of a defense each, and what they show of an attack: touched or not, adapted or not.

Still runs, at a rate of 0, learn nothing, so that a defended run has the weights of an undefended one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from unittest.mock import patch

import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.attacks.base import Attack, DefenseEffect, Knowledge, Needs, Phase, Target
from splitfed.attacks.labels.co_training import CoTraining
from splitfed.attacks.labels.gaussian_mixture import GaussianMixture
from splitfed.attacks.labels.label_attack import gradient_rows
from splitfed.attacks.training_time.training_attack import TrainingAttack
from splitfed.core.defense import (
    Defense,
    GradientDefense,
    LabelDefense,
    PenaltyDefense,
    ReceiverPenaltyDefense,
    ReleaseDefense,
    TaskWeightDefense,
)
from splitfed.core.defense_context import Context
from splitfed.core.messages import View
from splitfed.core.optimizers import Optim
from splitfed.core.random import generator, stream
from splitfed.core.tasks import Task, binary, classification
from splitfed.core.topology import Topology
from splitfed.data.dataset import Dataset, Federation
from splitfed.defenses import DpSgd
from splitfed.registry import TABLES
from splitfed.topologies import u_shaped, vanilla, vertical
from splitfed.training.run import Run
from tests.attacks.token_examples import Bag
from tests.attacks.training_time_examples import small
from tests.examples import asked
from tests.golden.cases import attack as least
from tests.topologies.vertical_examples import LINKED, linked, perceptron, with_active


@dataclass(frozen=True, kw_only=True)
class Shifted(ReleaseDefense):
    """Adds one to all that leaves."""

    def release(self, name: str, z: Tensor, context: Context) -> Tensor:
        return z + 1


@dataclass(frozen=True, kw_only=True)
class Shrunk(PenaltyDefense):
    """Penalizes the mean square of what leaves; `by_layers`: as if it read layers of the sender for that."""

    by_layers: bool = False

    @property
    def penalty_reads_layers(self) -> bool:
        return self.by_layers

    def penalty(self, z: Tensor, context: Context) -> Tensor:
        return 10 * z.square().mean()


@dataclass(frozen=True, kw_only=True)
class Weighed(TaskWeightDefense):
    """Weighs the task by a quarter."""

    def task_weight(self, epoch: int) -> float:
        return 0.25


@dataclass(frozen=True, kw_only=True)
class Tilted(GradientDefense):
    """Multiplies the numbers of every row's gradient by 1, 2, 3 and so on, every second row's by -1 as well."""

    def gradient(self, name: str, g: Tensor, context: Context) -> Tensor:
        flat = g.flatten(1)
        signs = 1 - 2 * (torch.arange(len(flat)) % 2).to(g)
        return (flat * torch.arange(1, flat.shape[1] + 1).to(g) * signs[:, None]).view_as(g)


@dataclass(frozen=True, kw_only=True)
class Decayed(ReceiverPenaltyDefense):
    """Penalizes the squares of the weights of whoever reads what crosses."""

    def penalty_at_receiver(self, context: Context) -> Tensor:
        assert context.module is not None
        return sum((p.square().sum() for p in context.module.parameters()), torch.zeros(()))


@dataclass(frozen=True, kw_only=True)
class Turned(LabelDefense):
    """Trains on the next class in place of the true one."""

    def heads(self, topology: Topology) -> tuple[str, ...]:
        return tuple(head.value for head in topology.heads)

    def relabel(self, y: Tensor, task: Task, generator: torch.Generator) -> Tensor:
        return (y + 1) % (2 if task.name == "binary" else task.outputs or 2)


PLANTED: dict[DefenseEffect, Defense] = {
    DefenseEffect.RELEASE: Shifted(),
    DefenseEffect.PENALTY: Shrunk(),
    DefenseEffect.LAYER_PENALTY: Shrunk(by_layers=True),
    DefenseEffect.TASK_WEIGHT: Weighed(),
    DefenseEffect.GRADIENT: Tilted(),
    DefenseEffect.RECEIVER_PENALTY: Decayed(),
    DefenseEffect.LABELS: Turned(),
    DefenseEffect.WEIGHTS: DpSgd(noise_multiplier=1.0, max_norm=1.0),
}
"""An effect of defenses -> one that has no other."""


@cache
def rows() -> Federation:
    """Rows of 16 numbers in two classes, with a second label set."""
    random = generator(2, "adaptation")
    x = torch.rand(148, 16, generator=random)
    y = (x[:, :8].sum(1) > 4).long()
    data = Dataset("rows", x, y, classification(2), (0.0, 1.0)).with_target("second", (x[:, 0] > 0.5).long(), binary())
    return data.clients(1, auxiliary=48, victims=12, validation=0.0, test=0.0)


@cache
def squares() -> Federation:
    """The same rows as images of 4x4 pixels, without a second label set."""
    x = torch.cat([rows().clients[0].train.x, rows().auxiliary.x, rows().victims.x])
    y = torch.cat([rows().clients[0].train.y, rows().auxiliary.y, rows().victims.y])
    found = Dataset("squares", x.view(-1, 1, 4, 4), y, classification(2), (0.0, 1.0))
    return found.clients(1, auxiliary=48, victims=12, validation=0.0, test=0.0)


def flat() -> nn.Module:
    """A perceptron that reads these images."""
    with stream(0):
        layers = [nn.Flatten(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 2)]
    return nn.Sequential(OrderedDict(zip(("flatten", "first", "bend", "last"), layers, strict=True)))


@cache
def columns() -> Federation:
    """The same rows held by two parties."""
    x = torch.cat([rows().clients[0].train.x, rows().auxiliary.x, rows().victims.x])
    y = torch.cat([rows().clients[0].train.y, rows().auxiliary.y, rows().victims.y])
    found = Dataset("columns", x, y, classification(2)).vertical({"left": range(8), "right": range(8, 16)})
    return found.clients(1, auxiliary=24, victims=24, validation=0.0, test=0.0)


def summed() -> Topology:
    """Two parties whose logits a server with the labels adds up."""
    with stream(0):
        sides = {side: nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)) for side in ("left", "right")}
    return vertical(sides, nn.Identity(), labels="server", fusion="sum")


def active() -> Topology:
    """Two parties of which one has the labels and joins what both make."""
    return with_active({role: perceptron((6, 3), 1) for role in LINKED}, nn.Linear(6, 2))


@dataclass(frozen=True)
class World:
    """A topology, its data, and who attacks there."""

    topology: Callable[[], Topology]
    data: Callable[[], Federation]
    adversary: str


@cache
def tokens() -> Federation:
    """Rows of six token ids."""
    return sf.data.markov_tokens(100, length=6).clients(1, auxiliary=32, victims=12, validation=0.0, test=0.0)


def bag() -> Topology:
    """Embedded tokens cross."""
    with stream(0):
        return vanilla(Bag(4), "embedding")


WORLDS: dict[str, World] = {
    "tokens": World(bag, tokens, "server"),
    "vanilla": World(lambda: vanilla(small(0, 3), "first"), rows, "server"),
    "images": World(lambda: vanilla(flat(), "first"), squares, "server"),
    "u_shaped": World(lambda: u_shaped(small(0, 3), ("first", "second")), rows, "server"),
    "summed": World(summed, columns, "left0"),
    "active": World(
        active,
        cache(lambda: linked(140).vertical(LINKED).clients(1, auxiliary=24, victims=12, validation=0.0, test=0.0)),
        "active0",
    ),
}

PLACES = {
    "token_decoder": "tokens",
    **dict.fromkeys(
        (
            *("norm", "direction", "spectral", "direct_label", "batch_label_inference", "model_completion", "similar"),
            *("gaussian_mixture", "co_training", "own_features"),
        ),
        "summed",
    ),
    "dip": "images",
    "grn": "active",
    "insider_labels": "u_shaped",
    "unsplit_labels": "u_shaped",
}
"""Attack -> the world where it is asked, where that is not the first."""

INSIDE = {"insider_labels": "sdar"}
"""Attack -> the training attack that it asks; one of the kind asks itself."""

RATE = 0.1


def train(world: str, effect: DefenseEffect | None, rate: float, inside: str | None) -> Run:
    place, plan = WORLDS[world], None if inside is None else least(inside)
    assert plan is None or isinstance(plan, TrainingAttack)
    return sf.train(
        place.topology(),
        place.data(),
        rounds=2,
        batch_size=16,
        optimizer=Optim("SGD", {"lr": rate}),
        defenses=() if effect is None else (PLANTED[effect],),
        adversaries=sf.Adversaries(training_attacks={} if plan is None else {place.adversary: plan}),
        seed=1,
    )


@cache
def trained(world: str, effect: DefenseEffect | None, rate: float = 0.0, inside: str | None = None) -> Run:
    """Train two epochs in `world` under `effect`; at a rate of 0 the weights stay what they were."""
    return train(world, effect, rate, inside)


@cache
def unimitated(world: str, effect: DefenseEffect, inside: str) -> Run:
    """The still run under `effect`, whose training attack is told of no defense."""
    with patch("splitfed.threats.training_time.of_client", lambda defenses, client: ()):
        return train(world, effect, 0.0, inside)


@cache
def moved(world: str, inside: str | None) -> Run:
    """The still run without a defense, the weights of the victims' party moved afterwards."""
    run = train(world, None, 0.0, inside)
    for name in {"client0", "left0", "peer0"}.intersection(run.engine.parties):
        for module in run.engine.parties[name].state.modules.values():
            for weight in module.parameters():
                weight.data += 0.3 * torch.randn(weight.shape, generator=generator(4, name, *weight.shape))
    return run


def inside(name: str) -> str | None:
    """Return the training attack that must be in the run for the attack `name`."""
    return INSIDE.get(name, name if name in TABLES["attacks"] and isinstance(least(name), TrainingAttack) else None)


def given(run: Run, name: str, attack: Attack) -> tuple[View, Knowledge]:
    """Return what `attack` is handed in `run`, defenses drawn as for the first time."""
    party = WORLDS[PLACES.get(name, "vanilla")].adversary
    case = run.evaluator.case(asked(run.evaluator, attack, party, name, seed=5))
    return case.view, case.knowledge


def predict(attack: Attack, evidence: tuple[View, Knowledge], known: tuple[View, Knowledge] | None = None) -> Tensor:
    """Return what `attack` predicts by what `known` holds beside the `evidence`: the view, and outputs on candidates.

    `known`: by default where the evidence is from. Its own segments belong to it.
    """
    view, knowledge = evidence[0], evidence[1]
    if known is not None:
        view, knowledge = replace(view, segments=known[0].segments), replace(known[1], predict=knowledge.predict)
    return attack(view, knowledge, generator(3, "asked")).prediction


def is_touched(name: str, attack: Attack, effect: DefenseEffect) -> bool:
    """Return whether `attack` predicts something else where `effect` is, the trained weights being the same."""
    world = PLACES.get(name, "vanilla")
    bare, defended = (given(trained(world, one, 0.0, inside(name)), name, attack) for one in (None, effect))
    return not torch.equal(predict(attack, bare), predict(attack, defended))


def uses(name: str, attack: Attack, effect: DefenseEffect) -> bool:
    """Return whether, on the same evidence, `attack` predicts something else where what it knows has the `effect`.

    A training attack has the evidence in its state, and in the other run it is told of no defense. Runs on membership
    are trained at all, as copies of them are.
    """
    world, inner = PLACES.get(name, "vanilla"), inside(name)
    rate = RATE if attack.target is Target.MEMBERS else 0.0
    run = trained(world, effect, rate, inner)
    other = trained(world, None, rate) if inner is None else unimitated(world, effect, inner)
    knowing = predict(attack, given(run, name, attack))
    return not torch.equal(predict(attack, given(run, name, attack), given(other, name, attack)), knowing)


def holds_trained(name: str, attack: Attack) -> bool:
    """Return whether, on the same evidence, `attack` predicts something else where the victims' segments are others.

    Such an attack asks or holds what training has made, with all that shaped it.
    """
    world, inner = PLACES.get(name, "vanilla"), inside(name)
    run = trained(world, None, 0.0, inner)
    first = predict(attack, given(run, name, attack))
    return not torch.equal(predict(attack, given(run, name, attack), given(moved(world, inner), name, attack)), first)


def estimates(name: str, attack: Attack, effect: DefenseEffect) -> bool:
    """Return whether, on the same evidence, `attack` predicts something else by what it fitted where `effect` is not.

    Where labels are changed nothing is estimated: known victims have their true ones.
    """
    if not isinstance(attack, GaussianMixture | CoTraining) or effect is DefenseEffect.LABELS:
        return False
    world = PLACES.get(name, "vanilla")
    knowing, lacking = (attack.fit(*given(trained(world, one), name, attack)) for one in (effect, None))
    evidence = gradient_rows(given(trained(world, effect), name, attack)[0])
    return not torch.equal(knowing.log_posterior(evidence), lacking.log_posterior(evidence))


def is_adapted(name: str, attack: Attack, effect: DefenseEffect) -> bool:
    """Return whether runs show that `attack` takes `effect` into account."""
    arrives = effect is DefenseEffect.RELEASE and Needs.RELEASES in attack.requires
    shapes_weights = attack.phase is Phase.INFERENCE and not arrives
    return (
        uses(name, attack, effect)
        or estimates(name, attack, effect)
        or (shapes_weights and holds_trained(name, attack))
    )
