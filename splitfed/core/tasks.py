"""A task is a loss and a metric; classification, binary and regression are built in, others are one's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from splitfed.core.errors import InvalidInput, check_count, check_number

Loss = Callable[[Tensor, Tensor], Tensor]
Metric = Callable[[Tensor, Tensor], float]
_MOST_FREQUENT = "always answering the most frequent class"


@dataclass(frozen=True)
class Task:
    """What is learnt: `loss(output, y)` is the batch mean, a scalar; `metric(outputs, y)` is over all rows.

    `outputs` is the width of the model's last layer (None: any); `metric_name` and `higher_is_better` say how to
    read the metric; `check(y)` raises `InvalidInput` for labels that the loss cannot take. `bounds`: the least and the
    greatest value that the metric can have, which intervals then respect. `constant(y, rows)`: the outputs, for `rows`
    rows, of whoever has seen the labels `y` of training and no input, and `constant_name` what that is called; None
    where there is no such answer to be set beside a model. `name` says what the labels are to attacks and defenses:
    "classification", "binary" and "regression" as those below have it; by any other name they are nothing that is
    known. Raises `InvalidInput` for what cannot be called, empty names, and bounds out of order.
    """

    name: str
    loss: Loss
    metric: Metric
    metric_name: str
    outputs: int | None
    higher_is_better: bool = True
    check: Callable[[Tensor], None] = lambda y: None
    bounds: tuple[float, float] = (-math.inf, math.inf)
    constant: Callable[[Tensor, int], Tensor] | None = None
    constant_name: str = ""

    def __post_init__(self) -> None:
        """Refuse what is no function, no name, or no range."""
        for what in ("loss", "metric", "check"):
            if not callable(given := getattr(self, what)):
                raise InvalidInput(f"{what}={given!r} is not allowed; expected a function")
        for what in ("name", "metric_name"):
            if not isinstance(given := getattr(self, what), str) or not given.strip():
                raise InvalidInput(f"{what}={given!r} is not allowed; expected text")
        if self.outputs is not None:
            check_count("outputs", self.outputs, low=1)
        if not isinstance(self.higher_is_better, bool):
            raise InvalidInput(f"higher_is_better={self.higher_is_better!r} is not allowed; expected True or False")
        expected = isinstance(self.bounds, (tuple, list)) and len(self.bounds) == 2
        if not expected or not all(isinstance(one, Real) for one in self.bounds) or not self.bounds[0] < self.bounds[1]:
            raise InvalidInput(f"bounds={self.bounds!r} is not allowed; expected the least and the greatest value")

    def with_loss(self, loss: Loss) -> Task:
        """Return the task with a loss of one's own: `loss(output, y)`, the mean over the rows, a scalar with gradient.

        It is computed where the head is, of what arrives there: labels as they are, or as a defense leaves them.
        """
        return replace(self, loss=loss)

    def with_metric(
        self,
        metric: Metric,
        name: str | None = None,
        *,
        higher_is_better: bool = True,
        bounds: tuple[float, float] = (-math.inf, math.inf),
    ) -> Task:
        """Return the task with a metric of one's own: `metric(outputs, y)` over all rows, a number within `bounds`.

        `name`: how tables and figures call it (default: the function's name).
        """
        given = getattr(metric, "__name__", type(metric).__name__) if name is None else name
        return replace(self, metric=metric, metric_name=given, higher_is_better=higher_is_better, bounds=bounds)


def classification(classes: int, class_weights: Sequence[float] | None = None) -> Task:
    """Cross-entropy and accuracy over `classes` classes; labels are int64 in [0, classes).

    `class_weights`: a number > 0 a class, by which the loss of each row of that class is multiplied. The batch's loss
    is their mean over the rows, so that a row's own does not depend on others' labels; `torch.nn.CrossEntropyLoss`
    divides by the sum of the weights in the batch instead, and differs by the mean weight of the batch. They are public
    numbers: weights that follow a client's own labels ("balanced") would tell the others how many of each class it has.
    """
    check_count("classes", classes, low=2)
    weights = None if class_weights is None else _check_class_weights(classes, class_weights)
    return Task(
        "classification",
        functional.cross_entropy if weights is None else partial(_weighted_cross_entropy, weights=weights),
        _accuracy,
        "accuracy",
        classes,
        check=partial(_check_classes, classes=classes),
        bounds=(0.0, 1.0),
        constant=partial(_most_frequent, classes=classes),
        constant_name=_MOST_FREQUENT,
    )


def binary() -> Task:
    """Logistic loss on one logit a row, and accuracy; labels are 0 or 1."""
    return Task(
        "binary",
        _logistic,
        _binary_accuracy,
        "accuracy",
        1,
        check=partial(_check_classes, classes=2),
        bounds=(0.0, 1.0),
        constant=_more_frequent,
        constant_name=_MOST_FREQUENT,
    )


def regression(outputs: int = 1) -> Task:
    """Mean squared error and R squared, averaged over the `outputs` targets."""
    check_count("outputs", outputs, low=1)
    return Task(
        "regression",
        _squared,
        _r_squared,
        "r_squared",
        outputs,
        check=_check_real,
        bounds=(-math.inf, 1.0),
        constant=_mean,
        constant_name="always answering the mean of the training rows",
    )


def _check_class_weights(classes: int, given: Any) -> tuple[float, ...]:
    """Return the weights as floats; refuse what is no positive number for each of so many `classes`."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise InvalidInput(
            f"class_weights={given!r} is not allowed; expected {classes} numbers: weights that follow a client's own "
            "labels would tell how many of each class it has"
        )
    if len(given) != classes:
        raise InvalidInput(f"class_weights has {len(given)} numbers; expected one for each of {classes} classes")
    for label, weight in enumerate(given):
        check_number(f"class_weights[{label}]", weight, low=0.0, open_low=True)
    return tuple(map(float, given))


def _weighted_cross_entropy(output: Tensor, y: Tensor, weights: tuple[float, ...]) -> Tensor:
    return functional.cross_entropy(output, y, output.new_tensor(weights), reduction="none").mean()


def _most_frequent(y: Tensor, rows: int, classes: int) -> Tensor:
    said = torch.zeros(rows, classes)
    said[:, int(torch.bincount(y.long(), minlength=classes).argmax())] = 1.0
    return said


def _more_frequent(y: Tensor, rows: int) -> Tensor:
    return torch.full((rows,), 1.0 if float(y.double().mean()) > 0.5 else -1.0)


def _mean(y: Tensor, rows: int) -> Tensor:
    mean: Tensor = y.double().mean(0, keepdim=True)
    return mean.expand(rows, *y.shape[1:])


def _accuracy(output: Tensor, y: Tensor) -> float:
    return float((output.argmax(1) == y).double().mean())


def _logistic(output: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(output.reshape(-1), y.to(output.dtype))


def _binary_accuracy(output: Tensor, y: Tensor) -> float:
    return float(((output.reshape(-1) > 0) == (y > 0.5)).double().mean())


def _squared(output: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(output.reshape(y.shape), y.to(output.dtype))


def _r_squared(output: Tensor, y: Tensor) -> float:
    target = y.double().reshape(len(y), -1)
    residual = (output.double().reshape(len(y), -1) - target).square().sum(0)
    total = (target - target.mean(0)).square().sum(0).clamp_min(torch.finfo(torch.float64).tiny)
    return float((1 - residual / total).mean())


def _check_classes(y: Tensor, classes: int) -> None:
    if y.dim() != 1:
        raise InvalidInput(f"labels have shape {tuple(y.shape)}; expected one label a row")
    if y.is_floating_point() and not bool((y == y.round()).all()):
        raise InvalidInput(f"labels must be whole numbers in [0, {classes - 1}]; found {float(y[y != y.round()][0])}")
    outside = (y < 0) | (y >= classes)
    if bool(outside.any()):
        raise InvalidInput(f"label {y[outside][0].item():g} is outside [0, {classes - 1}]")


def _check_real(y: Tensor) -> None:
    if not bool(torch.isfinite(y.double()).all()):
        raise InvalidInput("targets hold a value that is not finite")
