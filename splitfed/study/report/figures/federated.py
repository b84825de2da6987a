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
from splitfed.drawing.figure import GRID, INK, MARKERS, PALETTE, Panel, Series, draw_svg, row_height, wrap_label
from splitfed.federated.topology_values import labelled_head, making_segment
from splitfed.study.report.data import Setting
from splitfed.study.results import RunResult
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
            head = labelled_head("fedproto", learner.topology, making_segment(learner.topology, value).role)
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


def plot_prototypes(found: PrototypeEmbeddings, name: str, seed: int = 0, rows: int = SHOWN) -> Markup:
    """Return an SVG element: a dot a row, and a large mark with the class's name for each prototype."""
    flat = lay_out(found, seed, rows)
    dots, marks = [], []
    for number, label in enumerate(sorted({*flat.y.tolist(), *(int(label) for label in flat.prototypes)})):
        marker = MARKERS[number // len(PALETTE) % len(MARKERS)]
        look: dict[str, Any] = {"color": PALETTE[number % len(PALETTE)], "marker": marker, "ls": ""}
        xs, ys = flat.z[flat.y == label].T.tolist()
        dots.append(Series(xs, ys, f"class {label}", look | {"ms": 3.5, "alpha": 0.55, "mew": 0}))
        if (place := flat.prototypes.get(str(label))) is not None:
            x, y = place.tolist()
            large = look | {"ms": 13, "mec": INK, "mew": 1.4, "zorder": 3}
            number_look = {"marker": f"${label}$", "color": "white", "ms": 6, "mew": 0, "zorder": 4}
            marks += [Series([x], [y], None, large), Series([x], [y], None, number_look)]
    title = {"xlabel": "dots: test rows, large marks: global prototypes (t-SNE)"}
    return draw_svg([Panel([*dots, *marks], axes=title, bare=True)], name, 6.4, 5.4)


def plot_client_scores(named: Sequence[tuple[str, Setting]], metric: str, name: str) -> Markup:
    """Plot each client's test utility on its own rows, a row a setting: every seed a dot, the mean over all a bar.

    Empty without a setting.
    """
    names, series = [wrap_label(label, 40) for label, _ in named], []
    for row, (_, setting) in enumerate(named):
        if not (scores := [s for run in setting.runs for s in run.utility.clients if s is not None]):
            continue
        mean, dot = sum(scores) / len(scores), {"color": PALETTE[row % len(PALETTE)], "marker": "o", "alpha": 0.45}
        series += [
            Series([min(scores), max(scores)], [row, row], None, {"color": GRID, "lw": 5, "zorder": 1}),
            Series(scores, [row] * len(scores), None, dot | {"ls": "", "ms": 5, "zorder": 2}),
            Series([mean, mean], [row - 0.28, row + 0.28], None, {"color": INK, "lw": 2, "zorder": 3}),
        ]
    title = {"xlabel": f"test {metric} of a client on its own rows (bar: the mean)"}
    return draw_svg([Panel(series, axes=title, rows=names)] if named else [], name, 7.4, row_height(names))


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
        run = next(run for run in setting.runs if run.seed == seed)
        if (path := _file(run)) is None:
            continue
        digests.check_file(path, run.files.get(FILE), f"delete it and result.json, {digests.AGAIN}")
        known = load_file(path)
        if len(known["z"]) + len(known) - 2 >= 4:
            marks = {key.removeprefix("prototype/"): t for key, t in known.items() if key.startswith("prototype/")}
            found.append((name, plot_prototypes(PrototypeEmbeddings(known["z"], known["y"], marks), f"prototypes{i}")))
    return found


def _file(run: RunResult) -> Path | None:
    """Return the path of the run's file; None where there is none in its own folder."""
    path = path_inside(run.place, FILE)
    return path if path is not None and path.is_file() else None
