"""Every defense with every topology, for three tasks: it trains and beats chance, or refuses with its reason."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from torch import Tensor, nn

import splitfed as sf
from splitfed.core.defense import Defense
from splitfed.core.random import stream
from splitfed.core.tasks import binary
from splitfed.data.dataset import Federation
from splitfed.models.mlp import mlp
from splitfed.registry import TABLES
from splitfed.topologies import custom, extended_vanilla, local, multi_hop, multi_task, u_shaped, vanilla, vertical

D = sf.defenses

# So weak that a few rounds suffice, and strong enough that the server learns something else than without; what they do
# to what crosses is for their own tests to say.
DEFENSES: dict[str, Defense] = {
    "distance_correlation": D.DistanceCorrelation(alpha=0.1),
    "dp_sgd": D.DpSgd(noise_multiplier=0.1, max_norm=1.0),
    "noise": D.Noise(scale=0.1),
    "gaussian_release": D.GaussianRelease(clip=4.0, noise_multiplier=0.02),
    "laplace_release": D.LaplaceRelease(clip=8.0, epsilon=200.0),
    "latent": D.Latent(epsilon=4000.0, whole=3, fraction=3, freeze=True),
    "marvell": D.Marvell(s=0.1),
    "max_norm": D.MaxNorm(),
    "iso": D.Iso(ratio=0.1),
    "label_dp": D.LabelDp(epsilon=5.0),
    "gradient_compression": D.GradientCompression(share=0.6),
    "gradient_rounding": D.GradientRounding(bins=64),
    "channel_pruning": D.ChannelPruning(ratio=0.2, width=8),
    "adversarial": D.Adversarial(threshold=-1.0, bottleneck=0, width=8),
    "mid": D.Mid(weight=1e-4),
    "mid_labels": D.MidLabels(weight=1e-4),
    "shredder": D.Shredder(members=2, scale=0.03),
    "dropout": D.Dropout(rate=0.1),
    "quantization": D.Quantization(bits=4),
    "top_k": D.TopK(k=12),
}


def tops(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.ReLU(), nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


def pair(columns: int) -> dict[str, nn.Module]:
    return {side: nn.Sequential(nn.Flatten(), nn.Linear(columns, 16)) for side in ("left", "right")}


def several(columns: int, outputs: int, labels: str) -> dict[str, Callable[[], sf.Topology]]:
    """Topologies of two parties with `columns` columns each; `labels`: who holds them."""
    return {
        "vertical": lambda: vertical(pair(columns), tops(32, outputs), labels=labels),
        "extended_vanilla": lambda: extended_vanilla(
            pair(columns), nn.Linear(32, 24), tops(24, outputs), labels=labels
        ),
        "multi_task": lambda: multi_task(
            pair(columns), {"one": tops(32, outputs), "two": tops(32, 1)}, targets={"one": None, "two": "second"}
        ),
    }


def chains(outputs: int, relayed: bool) -> dict[str, Callable[[], sf.Topology]]:
    """Topologies of one model cut in a row; `relayed`: whether hops pass the labels on, or the server owns them."""
    cuts = ("relu1", "relu2", "relu3")

    def net() -> nn.Module:
        return mlp((8, 8), outputs, (24, 20, 16), seed=None)

    return {
        "vanilla": lambda: vanilla(net(), "relu1"),
        "u_shaped": lambda: u_shaped(net(), ("relu1", "relu3")),
        "multi_hop": lambda: multi_hop(net(), cuts, labels="relayed" if relayed else "server"),
        "local": lambda: local(net(), ("relu2",)),
        "custom": lambda: custom(
            [
                # The client's second segment reads what its first made; the server joins both.
                sf.Segment("one", "client", nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU()), ("x",), ("a",)),
                sf.Segment("two", "client", nn.Linear(20, 16), ("a",), ("b",)),
                sf.Segment("join", "server", sf.topologies.Fusion("concat"), ("a", "b"), ("c",)),
                sf.Segment("top", "server", tops(36, outputs), ("c",), ("out",)),
            ],
            {"x": "client"},
            [sf.Head("out", "server", "client")],
        ),
    }


# Where digits are told from each other, labels cross; in the other two tasks the server owns them where it can.
TOPOLOGIES: dict[str, dict[str, Callable[[], sf.Topology]]] = {
    "digits": {**chains(10, True), **several(32, 10, "right")},
    "parity": {**chains(1, False), **several(32, 1, "server")},
    "tumours": several(15, 1, "server"),
}
# What a run must reach above the share of the most frequent class in its test rows.
MARGIN = {"digits": 0.15, "parity": 0.1, "tumours": 0.1}
ROUNDS = {"digits": 4, "parity": 3, "tumours": 3}
CELLS = [(task, name, defense) for task, made in TOPOLOGIES.items() for name in made for defense in DEFENSES]

ALONE = ("dp_sgd", "label_dp")
BACKWARDS = ("marvell", "max_norm", "iso", "gradient_compression", "gradient_rounding", "mid_labels")
NO_EDGE = "{1} has no edge to guard: no data owner sends anything here"
NO_GRADIENT = "{1} has no gradient to guard: none goes from a party that knows labels to one that does not (labels of"
SENT_TO = "marvell needs the labels where the gradient on '{}->{}' comes from; role 'server' holds none of its own"
# Tasks, topologies, defenses, and how what they say begins.
ROWS: list[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], str]] = [
    # Whole models: nothing crosses in a step, so only what guards weights or labels has anything to do.
    (("digits", "parity"), ("local",), tuple(d for d in DEFENSES if d not in (*ALONE, *BACKWARDS)), NO_EDGE),
    (("digits", "parity"), ("local",), BACKWARDS, NO_GRADIENT),
    # Labels cross forward: everybody on the way knows them.
    (("digits", "parity"), ("vanilla", "custom"), BACKWARDS, NO_GRADIENT),
    (("digits",), ("multi_hop",), BACKWARDS, NO_GRADIENT),
    (("digits",), ("u_shaped", "multi_task"), ("marvell",), "marvell hides labels of two classes; this task has 10"),
    (("digits",), ("vertical",), ("marvell",), SENT_TO.format("bottom_left", "fusion")),
    (("digits",), ("extended_vanilla",), ("marvell",), SENT_TO.format("middle", "top")),
    (("digits", "parity"), ("custom",), ("latent",), "latent turns 'a' into bits, but segment 'two' at 'client'"),
    (("tumours",), tuple(TOPOLOGIES["tumours"]), ("adversarial",), "adversarial compares images, and role 'left' has"),
]
REFUSED = {
    (t, n, d): text.format(d, type(DEFENSES[d]).__name__)
    for tasks, names, which, text in ROWS
    for t in tasks
    for n in names
    for d in which
}


@cache
def data(task: str) -> Federation:
    if task == "tumours":
        rows = sf.data.breast_cancer()
        parts = rows.vertical({"left": range(15), "right": range(15, 30)}, overlap=True)
        second = (rows.x[:, 0] > rows.x[:, 0].median()).long()
    else:
        rows = sf.data.digits().rows(range(500))
        second = (rows.y >= 5).long()
        if task == "parity":
            rows = sf.data.from_arrays(rows.x, (rows.y % 2).long(), task=binary(), name="parity")
        parts = rows.halves()
    parts = parts.with_target("second", second, binary())
    return parts.clients(1, auxiliary=0, victims=1, validation=0.0, test=0.3)


@cache
def chance(task: str) -> float:
    """The share of the most frequent class among the test rows: what knowing nothing of x can reach."""
    y = data(task).test_union().y
    return float(y.long().bincount().max()) / len(y)


def trained(task: str, name: str, rounds: int, *guards: Defense) -> sf.Run:
    with stream(3):
        topology = TOPOLOGIES[task][name]()
    return sf.train(
        topology,
        data(task),
        rounds=rounds,
        batch_size=32,
        optimizer=sf.Optim("Adam", {"lr": 0.02}),
        defenses=guards,
        evaluation=sf.Evaluation(every=rounds),
    )


def server(run: sf.Run) -> dict[str, Tensor]:
    """The weights of the server, without the names of layers that a defense put around its segments."""
    (role,) = (r for r in run.engine.topology.roles if r == "server")
    return {name.replace("module.", ""): t for name, t in run.engine.party(0, role).state.contents().items()}


@cache
def undefended() -> dict[str, Tensor]:
    return server(trained("parity", "u_shaped", 1))


def test_nothing_is_missing() -> None:
    assert set(DEFENSES) == set(TABLES["defenses"])
    assert set().union(*TOPOLOGIES.values()) == set(TABLES["topologies"])
    assert set(REFUSED) <= set(CELLS)


def one_task_a_pair() -> set[tuple[str, str, str]]:
    """Cells in which every defense meets a fifth of the topologies, the tasks in turn."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for task, name, defense in CELLS:
        if (task, name, defense) not in REFUSED:
            pairs.setdefault((name, defense), []).append(task)
    return {(tasks[i % len(tasks)], *pair) for i, (pair, tasks) in enumerate(pairs.items()) if i % 5 == 0}


@pytest.mark.parametrize(
    ("task", "name", "defense"),
    [
        pytest.param(*cell, marks=() if cell in REFUSED or cell in one_task_a_pair() else pytest.mark.exhaustive)
        for cell in CELLS
    ],
)
def test_learns_or_refuses(task: str, name: str, defense: str) -> None:
    if (reason := REFUSED.get((task, name, defense))) is not None:
        with pytest.raises(sf.InvalidInput) as error:
            trained(task, name, 1, DEFENSES[defense])
        assert str(error.value).startswith(reason)
        return
    run = trained(task, name, ROUNDS[task], DEFENSES[defense])
    assert run.accuracy > chance(task) + MARGIN[task]


@pytest.mark.parametrize("defense", DEFENSES)
def test_without_it_the_server_learns_something_else(defense: str) -> None:
    """One round each; two runs without a defense end in the same bits."""
    found, bare = server(trained("parity", "u_shaped", 1, DEFENSES[defense])), undefended()
    assert set(bare) <= set(found)
    moved = max(float((found[n] - t).abs().max()) for n, t in bare.items())
    assert moved > 1e-5, f"{defense} as DEFENSES has it changes nothing here: take a stronger one"


@pytest.mark.parametrize("name", DEFENSES)
def test_one_number_a_row_is_guarded_or_refused_by_name(name: str) -> None:
    """What crosses is (rows,), and so is its gradient, which tells the server's labels."""
    segments = [
        sf.Segment("one", "client", nn.Sequential(nn.Flatten(), nn.Linear(64, 1), nn.Flatten(0)), ("x",), ("z",)),
        sf.Segment("two", "server", nn.Sequential(nn.Unflatten(0, (-1, 1)), tops(1, 1)), ("z",), ("out",)),
    ]
    topology = custom(segments, {"x": "client"}, [sf.Head("out", "server", "server")])
    # Of few bits each has its chance; with a larger epsilon it is one.
    few = {"top_k": D.TopK(k=1), "latent": D.Latent(epsilon=40.0, whole=3, fraction=3)}
    defense = few.get(name, DEFENSES[name])
    if name in ("channel_pruning", "mid", "mid_labels"):
        with pytest.raises(sf.InvalidInput, match=name):
            sf.train(topology, data("parity"), rounds=1, defenses=(defense,))
    else:
        run = sf.train(topology, data("parity"), rounds=1, batch_size=100, defenses=(defense,))
        assert all(bool(weight.isfinite().all()) for weight in run.engine.party(0, "server").state.contents().values())
