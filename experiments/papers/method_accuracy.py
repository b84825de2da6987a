"""Every federated method beside training alone, with optimizers that go on or are restarted, and both first weights.

No single paper: the same clients, network, optimizer and rounds for all, each method as it comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import splitfed as sf
from experiments.papers.fedproto import own_accuracies
from experiments.papers.method_controls import FedKDControl, FedMDControl, FMLControl, MAFMLControl
from experiments.papers.table import PERCENT, Cell, Measured, Table, markdown, mean, signed, verdict
from splitfed.core.optimizers import Optim
from splitfed.federated import FedKD, FedMD, Method, Scaffold
from splitfed.models.lenet import lenet
from splitfed.registry import TABLES, load
from splitfed.schedules import Independent
from splitfed.topologies import local

SEEDS = (0, 1, 2)
CLIENTS, ROUNDS, BATCH, RATE, MOMENTUM, SKEW = 10, 12, 16, 0.02, 0.9, 0.3
ALONE = "standalone"
OWN, AMONG, ALL = "own", "own classes", "all"


class Way(NamedTuple):
    """The two settings of a run that are the same for all methods."""

    restart: bool
    starts: str

    @property
    def called(self) -> str:
        """What the way is called in keys and heads of columns."""
        return f"{'restarted' if self.restart else 'kept'}, {self.starts}"


DEFAULT, RESTARTED, APART = Way(False, "shared"), Way(True, "shared"), Way(False, "own")
WAYS = (DEFAULT, RESTARTED, APART)


@dataclass(frozen=True)
class Variant:
    """A method with other rounds, rates or steps: what it tries of why a method is below training alone."""

    name: str
    rounds: int = ROUNDS
    rate: float = RATE
    momentum: float = MOMENTUM
    steps: int | None = None
    method: Method | None = None
    way: Way = DEFAULT


# What stands below training alone, and what is tried of its reason.
PLAIN, TWICE = "`standalone` as it comes", "`standalone` with twice the rounds"
TRIED = {
    PLAIN: Variant(ALONE),
    "`fedsgd` takes one step a round: `standalone` with one step a round": Variant(ALONE, steps=1),
    "`per_fedavg` takes half the steps: `per_fedavg` with twice the rounds": Variant("per_fedavg", rounds=2 * ROUNDS),
    "`aggregation` takes more than half of its rows from others: `aggregation` with twice the rounds": Variant(
        "aggregation", rounds=2 * ROUNDS
    ),
    "`fml` halves a client's own loss: `fml` at twice the rate": Variant("fml", rate=2 * RATE),
    "`pfedme` has no momentum in what is averaged: `standalone` without momentum": Variant(ALONE, momentum=0.0),
    TWICE: Variant(ALONE, rounds=2 * ROUNDS),
    "`fedmd` as it comes": Variant("fedmd"),
    "`fedmd` with twice the rounds": Variant("fedmd", rounds=2 * ROUNDS),
    "`fedmd` without digestion, only the passes over public rows at first": Variant(
        "fedmd", method=FedMDControl(digests=False)
    ),
    "`fedmd`, steps of digestion towards nothing (weight 0)": Variant("fedmd", method=FedMDControl(weight=0.0)),
    "`fedmd`, digestion with momentum of its own": Variant("fedmd", method=FedMDControl(separate=True)),
    "`fedmd`, digestion with momentum of its own, with twice the rounds": Variant(
        "fedmd", rounds=2 * ROUNDS, method=FedMDControl(separate=True)
    ),
    "`fedmd`, momentum of its own, the mean over clients that train on the row's class": Variant(
        "fedmd", method=FedMDControl(separate=True, informed=True)
    ),
    "`fedmd`, momentum of its own, digestion from the seventh round on": Variant(
        "fedmd", method=FedMDControl(separate=True, begin=6)
    ),
    "`fedmd` with 32 public rows a round: one step of digestion": Variant("fedmd", method=FedMD(rows=32)),
    "`mafml` as it comes": Variant("mafml"),
    "`mafml` with twice the rounds": Variant("mafml", rounds=2 * ROUNDS),
    "`mafml` without the labels of others' rows": Variant("mafml", method=MAFMLControl(entropy=0.0)),
    "`fml` as it comes": Variant("fml"),
    "`fml` with twice the rounds": Variant("fml", rounds=2 * ROUNDS),
    "`fml`, own loss by a half, no divergence": Variant("fml", method=FMLControl(divergence=0.0)),
    "`fml`, own loss whole, divergence by a half": Variant("fml", method=FMLControl(own=1.0)),
    "`fedkd` as it comes": Variant("fedkd"),
    "`fedkd` with twice the rounds": Variant("fedkd", rounds=2 * ROUNDS),
    "`fedkd` without the divergence of class scores": Variant("fedkd", method=FedKDControl(divergence=0.0)),
    "`fedkd` without the distance of hidden values": Variant("fedkd", method=FedKDControl(distance=0.0)),
    "`fedkd`, updates whole": Variant("fedkd", method=FedKD(energy=1.0, last_energy=1.0)),
    "`scaffold`, restarted": Variant("scaffold", way=RESTARTED),
    "`scaffold`, restarted, variates of gradients": Variant(
        "scaffold", method=Scaffold(variates="gradient"), way=RESTARTED
    ),
    "`scaffold`, restarted, at half the rate": Variant("scaffold", rate=RATE / 2, way=RESTARTED),
}


def train(variant: Variant, way: Way, seed: int, rows: int | None = None) -> sf.Run:
    """Train LeNet, whole at ten clients, by the method called `variant.name` with the parameters it comes with."""
    data = sf.data.mnist5k() if rows is None else sf.data.mnist5k().rows(range(0, 5000, 5000 // rows))
    clients = data.clients(
        CLIENTS, dirichlet=SKEW, minimum=10, auxiliary=0, victims=0, validation=0.0, test=0.3, public=0.1, seed=seed
    )
    return sf.train(
        local(lenet((1, 28, 28), 10, pool="max", seed=seed), ("relu4",)),
        clients,
        schedule=Independent(steps=variant.steps),
        method=variant.method or load("methods", variant.name)(),
        rounds=variant.rounds,
        batch_size=BATCH,
        optimizer=Optim("SGD", {"lr": variant.rate, "momentum": variant.momentum}),
        local=sf.LocalUpdate(restart_optimizers=way.restart, starts=way.starts),
        evaluation=sf.Evaluation(every=variant.rounds, across_clients=True),
        seed=seed,
    )


def measure(variant: Variant, way: Way, seed: int, state: Path, rows: int | None = None) -> dict[str, Any]:
    """Train; return accuracies in percent, means over clients: see the budget. `diverged` where training did."""
    try:
        run = train(variant, way, seed, rows)
    except sf.NonFinite as error:
        return {"diverged": str(error)}
    last = run.history[-1]["test"]
    return {
        OWN: 100 * fmean(last["clients"]),
        "each": [100 * float(score) for score in last["clients"]],
        AMONG: 100 * fmean(own_accuracies(run)),
        ALL: 100 * fmean(last["across"]["union"]),
        "starts": run.training.starts,
        "MiB": run.bytes / 2**20,
    }


def show(done: Measured) -> str:
    """Return the table of the methods, and which are below training alone in each way."""
    lines = [line for name in _order() if any((line := _line(done, name))[1:])]
    head = ["method", *(f"own rows: {way.called}" for way in WAYS), "own rows, among own classes", "all rows", "MiB"]
    gaps = [line for name in _order() if name != ALONE and any((line := _gaps(done, name))[1:])]
    claims = ["minus standalone", "own rows", "own rows: restarted", "own rows, among own classes", "all rows"]
    tried = [line for told, one in TRIED.items() if any((line := _tried(done, told, one))[1:])]
    seeds = ", ".join(str(seed) for seed in SEEDS)
    heads = ["tried of what is below", "own rows", "minus standalone", f"worst client, seeds {seeds}", "the others"]
    why = [markdown(heads, tried)] if tried else []
    return "\n\n".join([markdown(head, lines), markdown(claims, gaps), *why, REMARKS])


def _tried(done: Measured, told: str, one: Variant) -> list[str]:
    """Return the line: accuracies, what they are above training alone in as many rounds, the worst client of a seed."""
    found = {seed: done[key] for seed in SEEDS if OWN in done.get(key := _why(told, seed), {})}
    pairs = [(entry, done.get(_beside(one, seed), {})) for seed, entry in found.items() if told not in (PLAIN, TWICE)]
    gaps = [float(entry[OWN]) - float(alone[OWN]) for entry, alone in pairs if OWN in alone]
    each = {seed: sorted(map(float, entry["each"])) for seed, entry in found.items() if "each" in entry}
    worst = ", ".join(f"{each[seed][0]:.1f}" if seed in each else "-" for seed in SEEDS) if each else ""
    rest = mean([fmean(scores[1:]) for scores in each.values()], PERCENT, 1) if each else ""
    own = mean([float(entry[OWN]) for entry in found.values()], PERCENT, 1) if found else ""
    return [told, own, signed(gaps) if gaps else "", worst, rest]


def _beside(one: Variant, seed: int) -> str:
    """Return the key of training alone in as many rounds, in the same way."""
    if one.way != DEFAULT:
        return _key(ALONE, one.way, seed)
    return _why(PLAIN if one.rounds == ROUNDS else TWICE, seed)


def _why(told: str, seed: int) -> str:
    return f"tried: {told} | seed {seed}"


def _line(done: Measured, name: str) -> list[str]:
    cells = [_mean(done, name, way, OWN) for way in WAYS]
    cells += [_mean(done, name, DEFAULT, AMONG), _mean(done, name, DEFAULT, ALL)]
    sent = [entry["MiB"] for entry in _found(done, name, DEFAULT).values() if "MiB" in entry]
    return [f"`{name}`", *cells, f"{fmean(sent):.1f}" if sent else ""]


def _mean(done: Measured, name: str, way: Way, what: str) -> str:
    entries = _found(done, name, way)
    lost = sum("diverged" in entry for entry in entries.values())
    scores = [float(entry[what]) for entry in entries.values() if what in entry]
    told = [*([mean(scores, PERCENT, 1)] if scores else []), *([f"{lost} of {len(entries)} diverged"] if lost else [])]
    return "; ".join(told)


def _gaps(done: Measured, name: str) -> list[str]:
    columns = ((DEFAULT, OWN), (RESTARTED, OWN), (DEFAULT, AMONG), (DEFAULT, ALL))
    return [f"`{name}`", *(_gap(done, name, way, what) for way, what in columns)]


def _gap(done: Measured, name: str, way: Way, what: str) -> str:
    """Return how far the method is above training alone in the same way, on the same seeds."""
    mine, alone = _found(done, name, way), _found(done, ALONE, way)
    pairs = [(mine[s], alone[s]) for s in mine if s in alone]
    gaps = [float(one[what]) - float(other[what]) for one, other in pairs if what in one and what in other]
    return f"{signed(gaps)}: {WORDS[verdict(gaps)]}" if gaps else ""


WORDS: Mapping[str, str] = {"confirmed": "above", "contradicted": "**below**", "not settled": "not settled"}


def _found(done: Measured, name: str, way: Way) -> dict[int, Mapping[str, Any]]:
    return {seed: done[key] for seed in SEEDS if (key := _key(name, way, seed)) in done}


def _key(name: str, way: Way, seed: int) -> str:
    return f"{name} | {way.called} | seed {seed}"


def _order() -> Sequence[str]:
    """Return the methods, training alone first."""
    return [ALONE, *(name for name in TABLES["methods"] if name != ALONE)]


# Where all that a client holds is broadcast, weights of its own change nothing.
BROADCAST = ("fedavg", "fedsgd", "fedprox", "scaffold", "fednova", "apfl", "pfedme", "per_fedavg", "ifca", "fedgen")


def _cells() -> tuple[Cell, ...]:
    """Return every way on the first seed, then on the others."""
    found = []
    for seed in SEEDS:
        for way in WAYS:
            names = [name for name in _order() if way != APART or name not in BROADCAST]
            found += [Cell(_key(n, way, seed), partial(measure, Variant(n), way, seed)) for n in names]
            tried = TRIED.items() if way == DEFAULT else ()
            found += [Cell(_why(told, seed), partial(measure, one, one.way, seed)) for told, one in tried]
    return tuple(found)


BUDGET = f"""MNIST-5k over {CLIENTS} clients by Dirichlet {SKEW}, drawn by the seed; 70 % of a client's rows to train
on (10 points of it shown to others, for the methods that share rows), 30 % to test on. LeNet with maximum pooling,
whole at every client, cut before its last layer. SGD at {RATE} with momentum {MOMENTUM}, batches of {BATCH}, {ROUNDS}
rounds of one epoch; every method with the parameters it comes with, nothing is searched. Accuracy in percent after the
last round, the mean over clients and seeds (at most {len(SEEDS)}) with its 95 % Student interval: of the model that a
client would use, on its own test rows; the same where it chooses among the classes that the client trained on; and on
the test rows of all clients. The heads of the columns say what the run was told: whether optimizers kept their momentum
from round to round or were restarted (`restart_optimizers`), and whether clients started from shared weights or from
their own (`starts`); a column that says nothing of it has the defaults, kept and shared. Where all that a client holds
is broadcast, own weights are the shared ones and are not measured again. Two hours on one idle core."""
REMARKS = """Where a number has no interval it is of seed 0 alone and settles nothing. What is said here is with
optimizers kept, of seed 0 where no other number of seeds is given. Most methods are above training alone; eight were
below on seed 0, and this is what was tried of the reasons.

Fewer steps, or slower ones. `fedsgd` moves once a round, twelve steps in all, and training alone with as many, and
momentum, comes to 37.6. `pfedme` averages weights that follow its models without momentum, at the plain rate;
training alone without momentum comes out lower still. `per_fedavg` takes half as many steps, and `aggregation` draws
more than half of its rows from others in as many steps; with twice the rounds both are as far as training alone of as
many. So are `fml`, `mafml` and `fedkd`: with twice the rounds each is from .1 below to 1.5 above training alone of as
many, on all three seeds. After twelve rounds training alone still gains, and what is behind is mostly the clients
with few rows, hence few steps: of the 5.0 points of `fml` and the 2.6 of `mafml` on seed 0, 3.4 are of the one client
with 162 rows, which still answers its most frequent class whatever the image (55.7), while the nine others of `mafml`
are above those of training alone. Its scores still differ from image to image, a little, and with twice the rounds it
has left that plateau (91.4 and 84.3).

For `fml` it is its own loss, which counts a half: without any divergence that alone costs .9, 4.9 and 4.0 points on
the three seeds, where the method loses 5.0, 3.5 and 3.3. With the own loss whole and the divergence kept it is 1.2
above training alone on seeds 1 and 2 and 1.7 below on seed 0; without both changes it is training alone to the bit.
`mafml` is not below: -2.6, -.4 and +2.2 on the three seeds; without the labels of others' rows, many of classes that
a client hardly has, it is at -.4, +2.0 and +2.3. `fedkd` is 1.1, .5 and .7 below; leaving out the divergence of class
scores (3.3, .4 and .8 below) or the distance of hidden values (.7 below, .5 above, 2.0 below) does not mend it, and
updates sent whole are no better on seed 0: none of the three by itself is the reason, and with twice the rounds
nothing is left of the gap.

`fedmd` is below on all three seeds, for another reason: clients digest a mean of models that know nothing yet. The
passes over public rows at first cost nothing to speak of (+.4, .0, -1.3); digestion does, and from the seventh round
on alone it does not: then the method is above training alone on all three seeds (+.6, +1.3, +.6). On seed 0 the mean
names 12 to 39 of 100 public rows of a client's classes aright in the five rounds before, and throws a client back to
about 40 % on its own training rows each time. A single step of it a round does no harm: +1.2, +1.9 and +2.3. To
average only clients that train on a row's class gives three and two points back on seeds 1 and 2, and knowing which
classes a client holds none. The paper trains to convergence before the first round. Besides, momentum goes from
digestion into own steps and back: steps of digestion towards nothing, without a gradient, cost 5.0, 8.1 and 3.3
points. Within twelve rounds momentum of its own gives back half a point to two; in longer runs it decides: with twice
the rounds `fedmd` falls to 66.9, 62.8 and 74.1, and to 92.3, 86.8 and 95.2 with `separate=True`, as the authors' code
has it. The clients that fell furthest give the same scores for every image (looked at on seeds 0 and 1), so that no
gradient tells one from another; with `separate` there is one of these, on seed 1, as low after 24 rounds as after
twelve (33.5).

No method is below for not knowing which classes a client holds: among those, averaged models gain half a point at
most; in the table of costs above, whose clients hold four classes, that is most of the gap. Restarting costs most
methods one to three points in these few steps, training alone as well; weights of their own change FedProto little,
and FedDistill for the worse.

`scaffold` diverged with restarted optimizers on one of three seeds, in its last rounds. It is one client, two of
whose classes make 86 % of its rows: the norm of its correction grows from .85 to 14.8 in six rounds, that of any
other stays below 2.6. A correction that is the same in every step leads it to where its gradients are large, these
become its variate, and that its next correction. That the variates weigh a round's first gradients most is not the
reason: plain means of them (`variates="gradient"`) hold on that seed, and fall from 91.7 to 67.0 on another. At half
the rate it does not diverge on seed 0. With momentum kept the same client's correction grows to 1.8 and shrinks
again; why, is not known."""

TABLE = Table("method_accuracy", "Accuracy of federated methods beside training alone", BUDGET, _cells(), show)
