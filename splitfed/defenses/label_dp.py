"""Label differential privacy: randomised response on training labels, or noise on the gradients computed from them.

Paper: Warner, "Randomized response", JASA 1965, for mode "labels"; Yang, Sun, Yao, Xie, Wang, "Differentially private
label protection in split learning", 2022 (the gradient perturbation of TPSL), for mode "gradient".

"labels": each training label is kept with probability e^epsilon / (e^epsilon + K - 1) for K classes, and otherwise
replaced by a uniformly drawn other class; once, when the holder gets its rows. Training has no further privacy cost.
Labels for scoring stay true.

"gradient": at every step the gradient of a row is g + sum_c u_c grad_c, where grad_c is the gradient for class c and
u_c ~ Laplace(2 / epsilon). Cross-entropy is linear in its target vector, so this is the gradient for the target
onehot(y) + u, and it is computed so: all that is learnt from the label, the holder's own segment included, comes from
the noisy target. One-hot vectors differ by 2 in L1, so a step is epsilon-DP for the labels of its batch; the steps
compose. With one logit the target is y + u, u ~ Laplace(1 / epsilon): two labels differ by 1, and g + u (grad_1 -
grad_0) is sent.

The guarantee holds for the label of each training row, while features are taken as known. "labels" covers all messages
of training; "gradient" covers all that is computed by the loss, but no other message that depends on labels (counts of
classes, shared rows): the privacy ledger lists those. Neither covers scores and reports of the label holder.
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
    """Differential privacy of labels, by randomised response or by noise on the cut gradient.

    `epsilon` > 0: of a label once (mode "labels") or in each step (mode "gradient"); `outputs`: heads whose labels are
    protected (empty: all).
    """

    epsilon: float = field(default=1.0, metadata=require_number("label_dp epsilon", low=0.0, open_low=True))
    mode: str = field(default="labels", metadata=require_name("label_dp mode", MODES))
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise `InvalidInput` for an epsilon that is not positive, an unknown mode, and for edges."""
        super().__post_init__()
        if self.on:
            raise InvalidInput(f"label_dp on={self.on!r} is not allowed: it acts on labels, not on edges; give outputs")

    @property
    def strength(self) -> Strength:
        """The epsilon of a label."""
        when = "once" if self.mode == "labels" else "at each step"
        return Strength("epsilon", self.epsilon, f"of a label, {when}", rises=False)

    @property
    def guarantee(self) -> str:
        """The guarantee for a label, once or in each step, in one line."""
        when = "drawn once" if self.mode == "labels" else "at each step, composed over the steps of a row"
        return f"epsilon {self.epsilon:g} for each training label, {when}"

    def edges(self, topology: Topology) -> tuple[str, ...]:
        """Return no edge, as labels are changed before anything crosses."""
        return ()

    def heads(self, topology: Topology) -> tuple[str, ...]:
        """Return the heads whose labels are protected."""
        known = [head.value for head in topology.heads]
        for name in self.outputs:
            check_names("head of label_dp:", known, name)
        return self.outputs or tuple(known)

    def check(self, topology: Topology, facts: TopologyFacts) -> None:
        """Raise `InvalidInput` for labels that are no classes or are used twice.

        In mode "gradient" also for labels that are sent to the party that computes the loss.
        """
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
                        f"{head.labels!r} sends them to {head.role!r}: use mode 'labels'"
                    )

    def event(self) -> Event:
        """Return the privacy event of one label's randomised response, or of one step for the label of a row in it."""
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
    """Return the probability that randomised response over `classes` classes keeps a label."""
    return 1 / (1 + (classes - 1) * exp(-epsilon))


def classes_of(task: Task | None) -> int:
    """Return the number of classes of `task`; raise `InvalidInput` for a task without classes."""
    found = None if task is None else {"binary": 2, "classification": task.outputs}.get(task.name)
    if found is None:
        named = "none" if task is None else task.name
        raise InvalidInput(f"label_dp protects class labels; the task is {named!r}")
    return found


def _check_labels_used_once(topology: Topology, head: Head) -> None:
    """Raise `InvalidInput` for a second head with the same labels, which would release them again."""
    for other in topology.heads:
        if other.value != head.value and other.target == head.target:
            raise InvalidInput(
                f"label_dp would not hold: heads {head.value!r} and {other.value!r} learn from the same labels, which "
                "would be released twice"
            )
