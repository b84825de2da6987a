"""The picture of what clients share as prototypes: test embeddings and the global prototypes, laid out by t-SNE.

Method: van der Maaten, Hinton, "Visualizing data using t-SNE", JMLR 9, 2008, as scikit-learn has it; Tan et al.
(FedProto, AAAI 2022) show embeddings in this way. Distances between far groups mean nothing in such a layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from splitfed.core.errors import InvalidInput
from splitfed.core.random import derive, generator
from splitfed.study.report.figures.style import INK, MARKERS, PALETTE, add_legend, as_svg, canvas
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
    """Return `found` in two dimensions, at most `rows` rows, drawn from `seed`, and all prototypes, together."""
    from sklearn.manifold import TSNE

    order = torch.randperm(len(found.z), generator=generator(seed, "shown"))[:rows].sort().values
    names = list(found.prototypes)
    every = torch.cat([found.z[order], *(found.prototypes[name].view(1, -1) for name in names)]).double()
    if len(every) < 4:
        raise InvalidInput(f"{len(every)} points are too few to be laid out; expected 4 or more")
    near = min(30.0, (len(every) - 1) / 3)
    state = derive(seed, "t-sne") % 2**32
    flat = TSNE(2, perplexity=near, init="pca", random_state=state, n_jobs=1).fit_transform(every.numpy())
    places = torch.from_numpy(flat)
    return PrototypeEmbeddings(
        places[: len(order)], found.y[order], dict(zip(names, places[len(order) :], strict=True))
    )


def plot_prototypes(found: PrototypeEmbeddings, name: str, seed: int = 0, rows: int = SHOWN) -> str:
    """Return an SVG element: a dot a row, and a large mark with the class's name for each prototype."""
    flat = lay_out(found, seed, rows)
    with canvas(1, 6.4, 5.4) as (figure, (axis,)):
        labels = sorted({*flat.y.tolist(), *(int(label) for label in flat.prototypes)})
        for number, label in enumerate(labels):
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
        add_legend(figure, axis)
        return as_svg(figure, name)
