"""What every attack's `quick` budget costs, in processor time and memory; and all victims at once against one by one.

Each measurement has a process of its own: `python -m experiments.papers.attack_costs NAME` prints it.
"""

from __future__ import annotations

import ctypes
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import splitfed as sf
from experiments.papers.table import Cell, Measured, Table, markdown
from splitfed.attacks.base import Attack, Knowledge
from splitfed.attacks.reconstruction.rmle import Rmle
from splitfed.attacks.reconstruction.unsplit import Unsplit
from splitfed.core.messages import Recording, View
from splitfed.core.optimizers import Optim
from splitfed.core.random import generator, stream
from splitfed.core.tasks import classification
from splitfed.core.topology import Segment
from splitfed.models.lenet import lenet
from splitfed.registry import TABLES, load
from splitfed.training.run import Run
from tests.topologies.vertical_examples import convolution, perceptron, with_active

VICTIMS, AUXILIARY, REPEATS = 32, 1500, 3
INSIDE = ("fsha", "sdar", "pcat")
GRADIENTS = ("dlg", "idlg", "inverting_gradients")
BINARY = ("norm", "direction", "spectral")
# Budgets of both sides of a ratio; what a victim's iteration costs does not depend on how many there are.
TOGETHER: dict[str, Attack] = {
    "rmle": Rmle(iterations=20),
    "unsplit": Unsplit(rounds=2, input_steps=5, model_steps=5, restarts=1),
}


def images(task: str = "digit", parts: bool = False) -> sf.Federation:
    """Return MNIST-5k with one client; the task "size" is whether a digit is five or more, "odd" is private."""
    data = sf.data.mnist5k()
    if task == "size":
        data = sf.Dataset("mnist5k", data.x, (data.y >= 5).long(), classification(2), data.value_range)
        data = data.with_target("odd", sf.data.mnist5k().y % 2, classification(2))
    return (data.halves() if parts else data).clients(1, auxiliary=AUXILIARY, victims=VICTIMS)


def network(outputs: int = 10) -> nn.Module:
    """Return LeNet for 28x28."""
    with stream(0):
        return lenet((1, 28, 28), outputs, seed=None)


def vanilla(task: str = "digit", **options: Any) -> Run:
    """LeNet, cut after its first pooling, one round."""
    topology = sf.topologies.vanilla(network(2 if task == "size" else 10), "pool1")
    return sf.train(topology, images(task), **{"rounds": 1, **options})


def u_shaped(task: str = "digit", **options: Any) -> Run:
    """LeNet in three: the last layer and the labels are the client's."""
    topology = sf.topologies.u_shaped(network(2 if task == "size" else 10), ("pool1", "relu4"))
    return sf.train(topology, images(task), rounds=1, **options)


def halves() -> Run:
    """Each of two parties holds half of every image; their logits are added up."""
    with stream(0):
        bottoms = {
            role: nn.Sequential(nn.Flatten(), nn.Linear(392, 64), nn.ReLU(), nn.Linear(64, 10))
            for role in ("left", "right")
        }
    topology = sf.topologies.vertical(bottoms, nn.Identity(), labels="server", fusion="sum")
    return sf.train(topology, images(parts=True), rounds=1)


def active() -> Run:
    """Each of two parties holds half of every image; one has the labels and the top, and sees the other's release."""
    bottoms = {role: convolution(number) for number, role in enumerate(("peer", "active"))}
    data = sf.data.mnist5k().halves(tuple(bottoms)).clients(1, auxiliary=AUXILIARY, victims=VICTIMS)
    return sf.train(with_active(dict(bottoms), perceptron((784, 64, 10), 0)), data, rounds=1)


def federated() -> Run:
    """Three clients with the whole model and one image each, and an aggregation server that records their weights."""
    segment = Segment("model", "client", network(), ("x",), ("out",))
    topology = sf.Topology("whole", (segment,), {"x": "client"}, (sf.Head("out", "client", "client"),))
    data = sf.data.mnist5k().rows(range(43)).clients(3, auxiliary=30, victims=10, validation=0.0, test=0.0)
    sgd = Optim("SGD", {"lr": 0.1})
    return sf.train(
        topology,
        data,
        schedule="splitfed_v1",
        rounds=1,
        optimizer=sgd,
        logging=sf.Logging(record=Recording(("fed_server",))),
    )


def averages(method: str = "fedproto") -> Run:
    """Five clients with the whole model and rows of five classes; the aggregation server records what they send."""
    data = sf.data.mnist5k().clients(5, classes_per_client=5, auxiliary=AUXILIARY, victims=VICTIMS)
    topology = sf.topologies.local(network(), ("relu4",))
    recorded = Recording(("fed_server",))
    return sf.train(
        topology, data, schedule="independent", method=method, rounds=1, logging=sf.Logging(record=recorded)
    )


def scene(name: str) -> tuple[Callable[[], Run], str | None, str]:
    """Return what makes the run that `name` goes against, the adversary, and the run in words."""
    if name in GRADIENTS:
        return federated, None, "federated averaging, one image a client"
    if name in BINARY:
        return partial(u_shaped, "size"), "server", "U-shaped, two classes"
    if name == "unsplit_labels":
        return u_shaped, "server", "U-shaped"
    if name in ("direct_label", "batch_label_inference", "model_completion"):
        return halves, "left0", "vertical, halves of images"
    if name == "attribute":
        return partial(vanilla, "size"), "server", "vanilla, two classes"
    if name == "insider_labels":
        # In a vanilla run labels reach the server anyway.
        spied = partial(
            u_shaped,
            adversaries=sf.Adversaries(training_attacks={"server": load("attacks", "sdar").with_budget("quick")}),
        )
        return spied, "server", "U-shaped, sdar"
    if name in ("class_shares", "prototype_inversion", "prototype_membership"):
        return averages, None, "fedproto, whole models"
    if name in ("upload_membership", "upload_lira", "upload_inversion", "update_shares"):
        return partial(averages, "fml"), None, "fml, whole models"
    if name == "grn":
        return active, "active0", "vertical, halves of images, one party active"
    return vanilla, "server", "vanilla"


def quick(name: str) -> Attack:
    """Return the budget `quick` of `name`."""
    attack: Attack = load("attacks", name).with_budget("quick", **({"attribute": "odd"} if name == "attribute" else {}))
    return attack


def costed(work: Callable[[], Any]) -> dict[str, float]:
    """Do `work`; return the seconds of processor time, and by how many MB the resident memory rose at its highest."""
    # What the allocator keeps of earlier work is handed back, or it would hide what this work needs.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, started = _resident("VmRSS"), time.process_time()
    work()
    return {"cpu": time.process_time() - started, "mb": _resident("VmHWM") - before}


def _resident(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def cost(name: str) -> dict[str, Any]:
    """Return what the attack `name` costs; one inside training costs what training takes longer with it."""
    if name in INSIDE:
        return _cost_inside(name)
    make, adversary, _ = scene(name)
    run, attack = make(), quick(name)
    # An attack that is not made for any of the runs here is said to be so, and does not end the table.
    if (refusal := run.evaluator.refusal(name, attack, adversary)) is not None:
        return {"refused": refusal}
    return costed(lambda: run.attack(attack, adversary=adversary))


def _cost_inside(name: str, rounds: int = 3) -> dict[str, Any]:
    attack, runs = quick(name), list[Run]()
    alone = costed(lambda: vanilla(rounds=rounds))
    spied = costed(
        lambda: runs.append(vanilla(rounds=rounds, adversaries=sf.Adversaries(training_attacks={"server": attack})))
    )
    asked = costed(lambda: runs[0].attack(attack))
    steps = sum(entry["steps"] for entry in runs[0].history)
    return {
        "cpu": asked["cpu"],
        "mb": max(asked["mb"], spied["mb"] - alone["mb"]),
        "step": (spied["cpu"] - alone["cpu"]) / steps,
        "honest step": alone["cpu"] / steps,
    }


def together(name: str) -> dict[str, Any]:
    """Return how many times as fast `name` is on all victims at once as on one after another (median of repeats)."""
    run = vanilla()
    view, knowledge = run.observe(), run.evaluator.grants.knowledge("server", 0, 0)
    pairs = [(_spent(TOGETHER[name], v, knowledge) for v in (_apart(view), [view])) for _ in range(REPEATS)]
    return {"ratio": statistics.median(single / joint for single, joint in pairs)}


def _spent(attack: Attack, views: list[View], knowledge: Knowledge) -> float:
    started = time.process_time()
    for view in views:
        attack(view, knowledge, generator(0))
    return time.process_time() - started


def _apart(view: View) -> list[View]:
    (message,) = view.select(kind="activation").messages
    rows = [{name: z[i : i + 1] for name, z in message.tensors.items()} for i in range(VICTIMS)]
    return [View(view.party, (message._replace(tensors=row),), view.segments) for row in rows]


def measure(name: str, state: Path) -> dict[str, Any]:
    """Return what `name` costs, measured in a process of its own."""
    command = [sys.executable, "-m", "experiments.papers.attack_costs", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(done: Measured) -> str:
    """Return costs, those inside training apart, and the ratios."""
    plain = [
        [f"`{name}`", scene(name)[2], f"{entry['cpu']:.1f}", f"{entry['mb']:.0f}"]
        for name in TABLES["attacks"]
        if (entry := done.get(name)) and "cpu" in entry and "step" not in entry
    ]
    inside = [
        [f"`{name}`", f"{1e3 * e['honest step']:.0f}", f"{1e3 * e['step']:.0f}", f"{e['cpu']:.1f}", f"{e['mb']:.0f}"]
        for name in INSIDE
        if (e := done.get(name))
    ]
    ratios = [
        f"`{name}` is {entry['ratio']:.1f}x as fast on {VICTIMS} victims at once as on one after another (aim: 4)"
        for name in TOGETHER
        if (entry := done.get(f"{name} together"))
    ]
    seconds: Mapping[str, Any] = done.get("inverse_network", {})
    if seconds:
        ratios.append(f"`inverse_network` takes {seconds['cpu']:.1f} s of one core (aim: 20)")
    tables = (
        markdown(["attack", "run", "CPU seconds", "memory above the run's [MB]"], plain),
        markdown(
            ["inside training", "an honest step [ms]", "added a step [ms]", "the prediction [s]", "memory added [MB]"],
            inside,
        ),
        f"{'; '.join(ratios)}." if ratios else "",
        "\n".join(f"Not measured: `{n}`: {e['refused']}." for n, e in done.items() if "refused" in e),
    )
    return "\n\n".join(tables)


BUDGET = f"""LeNet on MNIST-5k, cut after its first pooling where the attack allows; {VICTIMS} victims of 28x28,
{AUXILIARY} auxiliary images, one round of training. Budget `quick`, scoring included. Seconds are processor time of one
thread, so that other programs on the machine matter little. Memory is by how much the peak of resident memory during
the attack exceeds what the process held before it, after the allocator gave back what it could; a process each; Linux
only. Attacks that retrain the model (`lira`, `membership_shadow`) cost as many trainings as they take copies, and this
model's takes a round. About 15 minutes."""

TABLE = Table(
    "attack_costs",
    "What the attacks cost",
    BUDGET,
    (
        *(Cell(name, partial(measure, name)) for name in TABLES["attacks"]),
        *(Cell(f"{name} together", partial(measure, f"{name} together")) for name in TOGETHER),
    ),
    show,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = sys.argv[1]
    print(json.dumps(together(asked.removesuffix(" together")) if asked.endswith(" together") else cost(asked)))
