"""Label differential privacy: training labels behind randomised response, or noise on every gradient they make.

Paper: Warner, "Randomized response", JASA 1965, for mode "labels"; Yang, Sun, Yao, Xie, Wang, "Differentially private
label protection in split learning", 2022 (the gradient perturbation of TPSL), for mode "gradient".

"labels": each training label stays with probability e^epsilon / (e^epsilon + K - 1) of K classes and is another,
every one as likely, otherwise; drawn once, when the holder takes its rows. All that training does afterwards costs
nothing more. Labels that are scored stay true.

"gradient": at every step the gradient of a row is g + sum_c u_c grad_c, where grad_c is the gradient for class c and
u_c ~ Laplace(2 / epsilon). Cross-entropy is linear in its target vector, so this is the gradient for the target
onehot(y) + u, and that is how it is computed: whatever is learnt from the label, the holder's own segment included,
comes from the noisy target. One-hot vectors differ by 2 in L1, so a step is epsilon-DP for the labels of its batch; the
steps compose. With one logit the target is y + u, u ~ Laplace(1 / epsilon): two labels differ by 1, and
g + u (grad_1 - grad_0) is sent.

The guarantee is for the labels of training rows, each by itself, while features are taken as known. "labels" covers
all that training sends; "gradient" what the loss makes of them, and no message that is made of labels in another way
(counts of classes, shown rows): the privacy ledger names those. Neither covers what the label holder scores or reports.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp

import torch
from torch import Tensor
from torch.nn import functional

from splitfed.core.defense import Accounted, LabelDefense, Strength
from splitfed.core.errors import InvalidInput, check_names, require_name, require_number
from splitfed.core.privacy_events import Event, Laplace, Protects, Pure, Unit
from splitfed.core.task_checks import check_class_probabilities
from splitfed.core.tasks import Task
from splitfed.core.topology import Head, Topology
from splitfed.core.topology_facts import TopologyFacts
from splitfed.defenses.private_noise import add_laplace

MODES = ("labels", "gradient")


@dataclass(frozen=True)
class LabelDp(LabelDefense, Accounted):
    """Differential privacy of labels, by randomized response or by noise on the cut gradient.

    `epsilon` > 0 for a label once ("labels") or at each step ("gradient"); `outputs`: of which heads (all).
    """

    epsilon: float = field(default=1.0, metadata=require_number("label_dp epsilon", low=0.0, open_low=True))
    mode: str = field(default="labels", metadata=require_name("label_dp mode", MODES))
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse an epsilon that is not positive, an unknown mode, and edges."""
        super().__post_init__()
        if self.on:
            raise InvalidInput(f"label_dp on={self.on!r} is not allowed: it acts on labels, on no edge; name outputs")

    @property
    def strength(self) -> Strength:
        """The epsilon of a label."""
        when = "once" if self.mode == "labels" else "at each step"
        return Strength("epsilon", self.epsilon, f"of a label, {when}", rises=False)

    @property
    def guarantee(self) -> str:
        """Per label, once or at each step."""
        when = "drawn once" if self.mode == "labels" else "at each step, composed over the steps of a row"
        return f"epsilon {self.epsilon:g} for each training label, {when}"

    def edges(self, topology: Topology) -> tuple[str, ...]:
        """None: it acts before anything crosses."""
        return ()

    def heads(self, topology: Topology) -> tuple[str, ...]:
        """Return the heads whose labels are protected."""
        known = [head.value for head in topology.heads]
        for name in self.outputs:
            check_names("head of label_dp:", known, name)
        return self.outputs or tuple(known)

    def check(self, topology: Topology, facts: TopologyFacts) -> None:
        """Refuse labels that are no classes or are released twice, and gradients of a party that gets the labels."""
        chosen = self.heads(topology)
        for head in topology.heads:
            if head.value in chosen:
                classes_of(head.task)
                _check_labels_used_once(topology, head)
                if self.mode == "gradient" and head.task is not None:
                    check_class_probabilities(head.task, "label_dp mode 'gradient'")
                if self.mode == "gradient" and head.role != head.labels:
                    raise InvalidInput(
                        f"label_dp mode 'gradient' needs the loss of {head.value!r} where its labels are; role "
                        f"{head.labels!r} sends them to {head.role!r}: take mode 'labels'"
                    )

    def event(self) -> Event:
        """Return the cost of one label's randomised response, or of one step for the label of a row in it."""
        mechanism = Pure(self.epsilon) if self.mode == "labels" else Laplace(1 / self.epsilon)
        return Event(mechanism, Protects.LABELS, Unit.LABEL)

    def relabel(self, y: Tensor, task: Task, generator: torch.Generator) -> Tensor:
        """Return randomised labels in mode "labels": same shape and type."""
        if self.mode != "labels":
            return y
        classes = classes_of(task)
        away = torch.rand(y.shape, generator=generator, device=y.device, dtype=torch.float64)
        # One of the others, all as likely: a step around the circle of classes.
        moved = (y.long() + torch.randint(1, classes, y.shape, generator=generator, device=y.device)) % classes
        return torch.where(away < keep_probability(self.epsilon, classes), y, moved.to(y.dtype))

    def targets(self, y: Tensor, task: Task, generator: torch.Generator) -> Tensor:
        """Return noisy targets in mode "gradient": (batch, classes), or (batch,) for one logit."""
        if self.mode != "gradient":
            return y
        single = task.name == "binary"
        exact = y.double() if single else functional.one_hot(y.long(), classes_of(task)).double()
        # Zeros and ones lie on every grid, so that rounding costs nothing; what `size` charges is a rest of 1e-8.
        sensitivity, size = (1.0, 1) if single else (2.0, exact.shape[1])
        return add_laplace(exact, sensitivity, 1 / self.epsilon, size, generator).to(torch.get_default_dtype())


def keep_probability(epsilon: float, classes: int) -> float:
    """Return the chance that randomised response over `classes` classes leaves a label as it is."""
    return 1 / (1 + (classes - 1) * exp(-epsilon))


def classes_of(task: Task | None) -> int:
    """Return the number of classes of `task`; raise `InvalidInput` for a task without classes."""
    found = None if task is None else {"binary": 2, "classification": task.outputs}.get(task.name)
    if found is None:
        named = "none" if task is None else task.name
        raise InvalidInput(f"label_dp protects labels that are classes; the task is {named!r}")
    return found


def _check_labels_used_once(topology: Topology, head: Head) -> None:
    """Refuse a second head with the same labels: it would release them again."""
    for other in topology.heads:
        if other.value != head.value and other.target == head.target:
            raise InvalidInput(
                f"label_dp would not hold: heads {head.value!r} and {other.value!r} learn from the same labels, which "
                "would be released twice"
            )
