"""Small runs with one effect of a defense each, and what they show of an attack: untouched, adapted or neither.

In a run `still` no party learns, so that a defended run has the weights of an undefended one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

import splitfed as sf
from splitfed.attacks.base import Attack, Effect, Knowledge, Target
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
from splitfed.data.dataset import Dataset
from splitfed.data.federation import Federation
from splitfed.defenses import DpSgd
from splitfed.topologies import u_shaped, vanilla, vertical
from splitfed.training.run import Run
from tests.attacks.training_time_examples import small
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


PLANTED: dict[Effect, Defense] = {
    Effect.RELEASE: Shifted(),
    Effect.PENALTY: Shrunk(),
    Effect.LAYER_PENALTY: Shrunk(by_layers=True),
    Effect.TASK_WEIGHT: Weighed(),
    Effect.GRADIENT: Tilted(),
    Effect.RECEIVER_PENALTY: Decayed(),
    Effect.LABELS: Turned(),
    Effect.WEIGHTS: DpSgd(noise_multiplier=1.0, max_norm=1.0),
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
def columns() -> Federation:
    """The same rows held by two parties, 0 and 1 for labels of one logit."""
    found = Dataset("columns", rows().auxiliary.x, rows().auxiliary.y, binary())
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


WORLDS: dict[str, World] = {
    "vanilla": World(lambda: vanilla(small(0, 3), "first"), rows, "server"),
    "u_shaped": World(lambda: u_shaped(small(0, 3), ("first", "second")), rows, "server"),
    "summed": World(summed, columns, "left0"),
    "active": World(
        active,
        cache(lambda: linked(140).vertical(LINKED).clients(1, auxiliary=24, victims=12, validation=0.0, test=0.0)),
        "active0",
    ),
}

PLACES = {
    **dict.fromkeys(
        ("norm", "direction", "spectral", "direct_label", "batch_label_inference", "model_completion"), "summed"
    ),
    "grn": "active",
    "insider_labels": "u_shaped",
    "unsplit_labels": "u_shaped",
}
"""Attack -> the world where it is asked, where that is not the first."""

INSIDE = {"insider_labels": "sdar"}
"""Attack -> the training attack that it asks; one of the kind asks itself."""

RATE = 0.1


@cache
def trained(world: str, effect: Effect | None, rate: float = 0.0, inside: str | None = None) -> Run:
    """Train two epochs in `world` under `effect`; at a rate of 0 the weights stay what they were."""
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


def inside(name: str) -> str | None:
    """Return the training attack that must be in the run for the attack `name`."""
    return INSIDE.get(name, name if isinstance(least(name), TrainingAttack) else None)


def asked(run: Run, name: str, attack: Attack, party: str) -> tuple[View, Knowledge]:
    """Return what `attack` is handed in `run`."""
    case = run.evaluator._case(name, attack, party, run.data.victims, 0, 5)
    return case.view, case.knowledge


def predicted(attack: Attack, view: View, knowledge: Knowledge) -> Tensor:
    return attack(view, knowledge, generator(3, "asked")).prediction


@dataclass(frozen=True)
class Shown:
    """What runs show of an attack and an effect.

    `touched`: whether it predicts something else where the effect is, the trained weights being the same. `uses`:
    whether, on the same evidence, it predicts something else where what it knows beside that has the effect.
    """

    touched: bool
    uses: bool


def show(name: str, attack: Attack, effect: Effect) -> Shown:
    """Return what runs without and with `effect` show of `attack`, registered or called `name`.

    Evidence is what arrived, and what the model says of candidates. Runs on membership are trained: their copies learn.
    """
    world = PLACES.get(name, "vanilla")
    rate = RATE if attack.target is Target.MEMBERS else 0.0
    runs = [trained(world, one, rate, inside(name)) for one in (None, effect)]
    (view, known), (defended, knowing) = (asked(run, name, attack, WORLDS[world].adversary) for run in runs)
    with_it = predicted(attack, defended, knowing)
    # Asked a second time defenses draw afresh, so both are handed out anew.
    (_, known), (_, knowing) = (asked(run, name, attack, WORLDS[world].adversary) for run in runs)
    ignorant = replace(known, predict=knowing.predict)
    return Shown(
        not torch.equal(predicted(attack, view, asked(runs[0], name, attack, WORLDS[world].adversary)[1]), with_it),
        not torch.equal(predicted(attack, defended, ignorant), with_it),
    )


@cache
def moved(world: str, inner: str | None) -> Run:
    """The still run without a defense, the weights of the party that holds rows moved."""
    run = trained.__wrapped__(world, None, 0.0, inner)
    for name, party in run.engine.parties.items():
        if name in ("client0", "left0", "peer0"):
            with torch.no_grad():
                for module in party.state.modules.values():
                    for weight in module.parameters():
                        weight += 0.3 * torch.randn(weight.shape, generator=generator(4, name, *weight.shape))
    return run


def holds_trained(name: str, attack: Attack) -> bool:
    """Return whether, on the same evidence, `attack` predicts something else where the victims' segments are others.

    Such an attack asks or holds what training has made, with all that shaped it.
    """
    world = PLACES.get(name, "vanilla")
    run = trained(world, None, 0.0, inside(name))
    view, known = asked(run, name, attack, WORLDS[world].adversary)
    other_view, other = asked(moved(world, inside(name)), name, attack, WORLDS[world].adversary)
    own = replace(view, segments=other_view.segments) if view.segments else view
    first = predicted(attack, view, known)
    known = asked(run, name, attack, WORLDS[world].adversary)[1]
    return not torch.equal(predicted(attack, own, replace(other, predict=known.predict)), first)
