"""Shared by attacks on uploads that reveal a model: pairs of models, one trained on the client's rows and one not.

For exchanged weights the pair is the same model after and before the client's own training. For scores of public rows
it is a student of the client's scores and a student of all others' scores, of the client's architecture. If the
exchanged model ends in features, the adversary adds a head of its own to both, a logistic regression on all rows whose
labels it knows, auxiliary ones and candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from splitfed.attacks.base import Knowledge, Needs, Progress, unwrap
from splitfed.attacks.membership.confidence import log_probabilities
from splitfed.attacks.networks.gradient_descent import descend
from splitfed.attacks.uploads.exchanged_model import ExchangedModel
from splitfed.core.errors import InvalidInput

KINDS = ("weights", "update", "weight gradient", "soft labels")
"""Kinds of messages that reveal a model; soft labels do if they are of public rows."""

SHOWN = frozenset(
    {
        Needs.EXCHANGED_MODEL,
        Needs.PUBLIC_SCORES,
        Needs.FRESH_MODEL,
        Needs.AUXILIARY,
        Needs.AUXILIARY_LABELS,
    }
)
"""Optional needs of an attack on an uploaded model."""

LEAST_PUBLIC = 2
"""Minimum number of public rows for a student, as batch norm cannot train on a single row."""

Predict = Callable[[Tensor], Tensor]
"""Maps rows (n, *shape) to log probabilities (n, classes) in float64, differentiable in the rows."""

HEAD_RIDGE = 1e-3
"""Factor of half the squared weights of the adversary's own head, on standardised features."""


class ModelPair(NamedTuple):
    """Two models: `after` was trained on the client's rows, `before` was not, or not in this round."""

    before: Predict
    after: Predict


def uploaded_models(
    who: str,
    knowledge: Knowledge,
    generator: torch.Generator,
    progress: Progress,
    newest: int | None = None,
    **training: Any,
) -> list[ModelPair]:
    """Return the pairs that the uploads reveal: one for each of the `newest` rounds (None: all), or one of students.

    `training`: epochs, rate and batch size of students, as `descend` takes them. Raises `InvalidInput` if the exchanged
    model cannot be run from raw rows, or ends in features and there are no auxiliary rows to fit a head on.
    """
    if (exchanged := knowledge.exchanged) is not None:
        rounds = exchanged.rounds if newest is None else exchanged.rounds[-newest:]
        heads = ModelReader(who, exchanged, knowledge)
        progress(0, 2)
        return [ModelPair(heads.read(one.before), heads.read(one.after)) for one in rounds]
    if (scores := knowledge.public_scores) is not None:
        if min(len(scores.x), len(scores.others_x)) < LEAST_PUBLIC:
            raise InvalidInput(
                f"{who} trains students on public rows: {LEAST_PUBLIC} or more that the client has scored, and that "
                f"others have; found {len(scores.x)} and {len(scores.others_x)}"
            )
        students: list[Predict] = []
        for number, (x, told) in enumerate(((scores.others_x, scores.others), (scores.x, scores.own)), 1):
            students.append(_student(knowledge, x, told, generator, training))
            progress(number, 2)
        return [ModelPair(*students)]
    raise InvalidInput(
        f"{who} needs a model in the client's uploads: the exchanged segments cannot be run from raw rows, and no "
        "scores of public rows were recorded"
    )


class ModelReader:
    """Turns exchanged weights into a function from rows to log probabilities."""

    def __init__(self, who: str, exchanged: ExchangedModel, knowledge: Knowledge) -> None:
        self._exchanged, self._classes = exchanged, unwrap(knowledge.classes)
        pairs = [
            (knowledge.auxiliary, knowledge.auxiliary_labels),
            # Whose labels are known as well: a head that knows them finds how far the features set them apart.
            (knowledge.candidates, knowledge.candidate_labels),
        ]
        known = [(x, y.view(-1)) for x, y in pairs if x is not None and y is not None]
        if not exchanged.scores and not known:
            raise InvalidInput(
                f"{who} needs rows with labels: what is exchanged ends in the features {exchanged.out!r}, and a head "
                "of its own must be fitted to them"
            )
        self._known = [torch.cat(part) for part in zip(*known, strict=True)] if known else []

    def read(self, tensors: Mapping[str, Tensor]) -> Predict:
        """Return the model with these weights, as a function from rows; behind features it has a fitted head."""
        run = partial(self._exchanged.run, tensors=tensors)
        if self._exchanged.scores:
            return lambda x: log_probabilities(run(x))
        x, y = self._known
        with torch.no_grad():
            features = run(x).flatten(1)
        head = fit_head(features, y, self._classes)
        return lambda x: head(run(x).flatten(1))


def fit_head(features: Tensor, labels: Tensor, classes: int) -> Predict:
    """Return a logistic regression from features (n, m) to log probabilities (n, classes), fitted to `labels` (n,).

    Features are standardised; L-BFGS in float64 starts from zero, so the result is deterministic.
    """
    z = features.detach().double()
    mean, deviation = z.mean(0), z.std(0, correction=0).clamp_min(1e-6)
    z, y = (z - mean) / deviation, labels.view(-1).long()
    weight = torch.zeros(z.shape[1], classes, dtype=torch.float64, device=z.device, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, device=z.device, requires_grad=True)
    search = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        search.zero_grad()
        found = functional.cross_entropy(z @ weight + bias, y) + HEAD_RIDGE / 2 * weight.square().sum()
        found.backward()
        return found

    with torch.enable_grad():
        search.step(loss)
    w, b = weight.detach(), bias.detach()
    return lambda rows: (((rows.double() - mean) / deviation) @ w + b).log_softmax(1)


def _student(
    knowledge: Knowledge, x: Tensor, told: Tensor, generator: torch.Generator, training: Mapping[str, Any]
) -> Predict:
    """Return a fresh model trained to give rows x (m, *shape) the probabilities `told` (m, classes)."""
    model = unwrap(knowledge.fresh_model)(int(torch.randint(2**62, (), generator=generator)))
    wanted = told.to(x.device)

    def loss(rows: Tensor, chosen: Tensor) -> Tensor:
        return -(wanted[chosen] * log_probabilities(model(rows[chosen]))).sum(1).mean()

    descend(model.parameters(), [x], loss, len(x), generator, **training)
    model.eval().requires_grad_(False)
    return lambda rows: log_probabilities(model(rows))
