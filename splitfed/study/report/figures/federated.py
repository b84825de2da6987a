"""The pictures of several clients: their own scores, and test embeddings beside the prototypes they share, by t-SNE.

Method: van der Maaten, Hinton, "Visualizing data using t-SNE", JMLR 9, 2008, as scikit-learn has it; Tan et al.
(FedProto, AAAI 2022) show embeddings in this way. Distances between far groups mean nothing in such a layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from markupsafe import Markup
from safetensors.torch import load_file, save
from torch import Tensor

from splitfed.core import digests
from splitfed.core.errors import InvalidInput
from splitfed.core.random import derive, generator
from splitfed.study.report.data import Setting
from splitfed.study.report.figures.style import GRID, INK, MARKERS, PALETTE, as_svg, canvas, wrap_label
from splitfed.study.trust import path_inside
from splitfed.training.checkpoint import write_atomic
from splitfed.training.run import Run

SHOWN = 1000


class PrototypeEmbeddings(NamedTuple):
    """Embeddings z (rows, width) of test rows with labels y (rows,), and the prototype (width,) of each class."""

    z: Tensor
    y: Tensor
    prototypes: Mapping[str, Tensor]


def compute_embeddings(run: Run, part: str = "test") -> PrototypeEmbeddings:
    """Return what every client makes of its rows of `part`, and the global prototypes, after the last round.

    Raises `InvalidInput` for a run whose method has no prototypes, or that has no such rows.
    """
    known: Mapping[str, Tensor] = run.method_state.get("prototypes", {})
    if run.method is None or not known:
        raise InvalidInput("the run has no prototypes to show: train it with method 'fedproto', a round or more")
    z, y = [], []
    for learner in run.learners if run.data.clients else ():
        if learner.rows(part):
            value = run.method.traits(learner.topology).class_means["prototype"]
            head = next(h for h in learner.topology.heads if h.labels == learner.topology.data_roles[0])
            z.append(learner.compute(value, part).flatten(1).cpu())
            y.append(learner.labels(head.value, part).view(-1).long().cpu())
    if not z:
        raise InvalidInput(f"no client has rows in {part!r}")
    return PrototypeEmbeddings(torch.cat(z), torch.cat(y), {name: tensor.cpu() for name, tensor in known.items()})


def lay_out(found: PrototypeEmbeddings, seed: int = 0, rows: int = SHOWN) -> PrototypeEmbeddings:
    """Return t-SNE coordinates (n, 2) of at most `rows` embeddings, drawn by `seed`, and of all prototypes."""
    from sklearn.manifold import TSNE

    order = torch.randperm(len(found.z), generator=generator(seed, "shown"))[:rows].sort().values
    names = list(found.prototypes)
    every = torch.cat([found.z[order], *(found.prototypes[name].view(1, -1) for name in names)]).double()
    if len(every) < 4:
        raise InvalidInput(f"{len(every)} points are too few to be laid out; expected 4 or more")
    near, state = min(30.0, (len(every) - 1) / 3), derive(seed, "t-sne") % 2**32
    layout = TSNE(2, perplexity=near, init="pca", random_state=state, n_jobs=1)
    places = torch.from_numpy(layout.fit_transform(every.numpy()))
    return PrototypeEmbeddings(
        places[: len(order)], found.y[order], dict(zip(names, places[len(order) :], strict=True))
    )


def plot_prototypes(found: PrototypeEmbeddings, name: str, seed: int = 0, rows: int = SHOWN) -> str:
    """Return an SVG element: a dot a row, and a large mark with the class's name for each prototype."""
    flat = lay_out(found, seed, rows)
    with canvas(1, 6.4, 5.4) as (figure, (axis,)):
        for number, label in enumerate(sorted({*flat.y.tolist(), *(int(label) for label in flat.prototypes)})):
            look: dict[str, Any] = {
                "color": PALETTE[number % len(PALETTE)],
                "marker": MARKERS[number // len(PALETTE) % len(MARKERS)],
                "ls": "",
            }
            here = flat.z[flat.y == label]
            axis.plot(here[:, 0], here[:, 1], ms=3.5, alpha=0.55, mew=0, label=f"class {label}", **look)
            if (place := flat.prototypes.get(str(label))) is not None:
                x, y = place.tolist()
                axis.plot([x], [y], ms=13, mec=INK, mew=1.4, zorder=3, **look)
                axis.text(x, y, str(label), ha="center", va="center", fontsize=8, color="white", zorder=4)
        axis.set(xticks=[], yticks=[], xlabel="dots: test rows, large marks: global prototypes (t-SNE)")
        axis.grid(visible=False)
        return as_svg(figure, name, axis)


def plot_client_scores(named: Sequence[tuple[str, Setting]], metric: str, name: str) -> str:
    """Plot each client's test utility on its own rows, a row a setting: every seed a dot, the mean over all a bar."""
    names = [wrap_label(label, 40) for label, _ in named]
    row_height = max(0.42, 0.12 + 0.17 * max(name.count("\n") + 1 for name in names))
    with canvas(1, 7.4, 1.1 + row_height * len(named)) as (figure, (axis,)):
        for i, (_, setting) in enumerate(named):
            if not (scores := [s for run in setting.runs for s in run["utility"]["clients"] if s is not None]):
                continue
            place, colour = len(named) - 1 - i, PALETTE[i % len(PALETTE)]
            axis.plot([min(scores), max(scores)], [place, place], color=GRID, lw=5, zorder=1)
            axis.plot(scores, [place] * len(scores), ls="", marker="o", ms=5, color=colour, alpha=0.45, zorder=2)
            mean = sum(scores) / len(scores)
            axis.plot([mean, mean], [place - 0.28, place + 0.28], color=INK, lw=2, zorder=3)
        axis.set_yticks(range(len(named)), list(reversed(names)))
        axis.set(ylim=(-0.6, len(named) - 0.4), xlabel=f"test {metric} of a client on its own rows (bar: the mean)")
        return as_svg(figure, name)


FILE = "prototypes.safetensors"
ROWS = 400


def save_prototypes(run: Run, folder: Path) -> dict[str, str]:
    """Write some test embeddings and the prototypes of `run` into its `folder`, where its method has prototypes.

    Returns file -> digest of what was written.
    """
    tested = any(len(client.test) for client in run.data.clients)
    means = {} if run.method is None else run.method.traits(run.engine.topology).class_means
    if "prototype" not in means or not run.method_state.get("prototypes") or not tested:
        return {}
    found = compute_embeddings(run)
    some = torch.randperm(len(found.z), generator=generator(run.seed, "kept"))[:ROWS].sort().values
    tensors = {f"prototype/{name}": t.float().contiguous() for name, t in found.prototypes.items()}
    tensors |= {"z": found.z[some].float().contiguous(), "y": found.y[some].contiguous()}
    content = save(tensors)
    write_atomic(folder / FILE, content)
    return {FILE: digests.of(content)}


def prototype_pictures(named: Sequence[tuple[str, Setting]]) -> list[tuple[str, Markup]]:
    """Return name and picture of every setting of `named` that has prototypes, all of the seed that most have."""
    there = [(name, s) for name, s in named if any(_file(run) for run in s.runs)]
    seeds = Counter(seed for _, s in there for seed in s.seeds)
    found = []
    for i, (name, setting) in enumerate(there):
        seed = min(setting.seeds, key=lambda s: (-seeds[s], s))
        run = next(run for run in setting.runs if int(run["seed"]) == seed)
        if (path := _file(run)) is None:
            continue
        digests.check_file(path, run.get("files", {}).get(FILE), f"delete it and result.json, {digests.AGAIN}")
        known = load_file(path)
        if len(known["z"]) + len(known) - 2 >= 4:
            marks = {key.removeprefix("prototype/"): t for key, t in known.items() if key.startswith("prototype/")}
            found.append(
                (name, Markup(plot_prototypes(PrototypeEmbeddings(known["z"], known["y"], marks), f"prototypes{i}")))
            )
    return found


def _file(run: Mapping[str, Any]) -> Path | None:
    """Return the path of the run's file; None where there is none in its own folder."""
    path = path_inside(Path(run["folder"]), FILE)
    return path if path is not None and path.is_file() else None
