"""PCAT: an honest server trains a pseudo-client against its own segments during training, and inverts it.

Paper: Gao, Zhang, "PCAT: functionality and data stealing from split learning by pseudo-client attack", USENIX Security
2023.

As in the paper. When (z, y) has arrived, auxiliary rows with the same labels are drawn (section 4.1); where labels do
not arrive, any rows (4.4). CE(g(f'(x_a)), y_a) moves the pseudo-client f' alone, g being the party's own segments as
they process z, before their step: they learn from the honest gradient and nothing else (algorithm 2). The attack begins
`start` steps late, as g is not informative at first (4.4). With `after` g is fixed: that many steps are taken on the
trained g at prediction (algorithm 1, Vanilla-PCAT). If labels do not arrive, a pseudo-head is trained with f' on the
same loss, and predicts the labels from g(z) (4.3). For inputs an inverse, of transposed convolutions and bilinear
upsampling, learns (f'(x_a), x_a), is applied to z, and its result x refined so that f'(x) = z (4.2). Layouts: the
client's own, weights drawn anew, with `layout="client"` ("same" in tables 2 and 3), or a generic residual network, for
f' may have any layout; those of the paper's other experiments are given in pictures only.

Ours, where the paper does not specify: Adam and its rates (3.1 gives the attacker the client's optimizer); g in
evaluation mode; blocks, losses and lengths of inverse and refinement; batches of 64 where none arrives. The inverse has
no tanh (the one of the paper that its table 14 gives in words has): on MNIST training with it got stuck at black
images. The pseudo-client's releases pass the run's defenses, drawn by the attacker, and its loss has the defenses'
factor and penalties as the client's: with distance correlation it is (1 - alpha) CE + alpha DCOR. The refinement stays
in the range of values, compares releases with defenses at their mean, and adapts where they are random
(`splitfed.attacks.reconstruction.inversion`). It can make a prediction worse if the pseudo-client is inaccurate. If no
labels arrive, pseudo-client and pseudo-head are not constrained to resemble the client's: both can fit g differently,
classify well together, and predict labels from the client's releases at or below chance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.base import Budgets, Needs, Target, check_classes, unwrap
from splitfed.attacks.networks.frozen_copy import FrozenCopy
from splitfed.attacks.networks.gradient_descent import take_step
from splitfed.attacks.networks.networks import Scale, Translator
from splitfed.attacks.networks.substitute_client import LAYOUTS, build_client, build_head, class_scores, loss_of
from splitfed.attacks.reconstruction.inversion import Search
from splitfed.attacks.training_time.attack_networks import evaluation_mode
from splitfed.attacks.training_time.attack_site import AttackSite
from splitfed.attacks.training_time.training_attack import Seen, TrainingAttack, TrainingAttackState
from splitfed.core.errors import require_count, require_name, require_number
from splitfed.core.messages import Message, View
from splitfed.core.random import derive, generator, stream

_SMOOTHNESS = 0.2  # variance by which neighbouring pixels differ, for images in [0, 1]


@dataclass(frozen=True)
class Pcat(TrainingAttack):
    """Trains pseudo-client and pseudo-head at rate `lr`, starting after `start` steps, and inverts the pseudo-client.

    The inverse takes `inverse_steps` at `inverse_lr`. `refine`: number of search steps from the inverse's prediction to
    a row with the received release. `after`: None, or the number of steps, in batches of 64, to take after training
    instead of during it.
    """

    learns_from: ClassVar[frozenset[Needs]] = frozenset({Needs.AUXILIARY, Needs.AUXILIARY_LABELS})
    budgets: ClassVar[Budgets] = {
        "quick": {"lr": 3e-3, "start": 50, "inverse_lr": 3e-3, "inverse_steps": 300, "refine": 50, "width": 24},
        "full": {
            "lr": 1e-3,
            "start": 100,
            "inverse_lr": 1e-3,
            "inverse_steps": 5000,
            "refine": 500,
            "width": 64,
            "layout": "client",
        },
    }

    lr: float = field(default=1e-3, metadata=require_number("pcat lr", low=0.0, open_low=True))
    start: int = field(default=100, metadata=require_count("pcat start"))
    inverse_lr: float = field(default=1e-3, metadata=require_number("pcat inverse_lr", low=0.0, open_low=True))
    inverse_steps: int = field(default=1000, metadata=require_count("pcat inverse_steps", low=1))
    refine: int = field(default=100, metadata=require_count("pcat refine"))
    refine_lr: float = field(default=0.01, metadata=require_number("pcat refine_lr", low=0.0, open_low=True))
    after: int | None = field(default=None, metadata=require_count("pcat after", low=1))
    width: int = field(default=24, metadata=require_count("pcat width", low=1))
    blocks: int = field(default=1, metadata=require_count("pcat blocks", low=1))
    layout: str = field(default="generic", metadata=require_name("pcat layout", LAYOUTS))

    def enter(self, site: AttackSite) -> TrainingAttackState:
        """Return the state.

        Raises `InvalidInput` for a task without classes, or a client that cannot be redrawn or trained.
        """
        check_classes("pcat", site.knowledge.classes)
        return PseudoClient(self, site)


class PseudoClient(TrainingAttackState):
    """State of PCAT: `client`, and `head` if the party's own segments compute no scores of classes."""

    plan: Pcat

    def build(self) -> None:
        """Build the pseudo-client, and the head."""
        plan, site, known = self.plan, self.site, self.site.knowledge
        self.scale = Scale(known.value_range)
        self.own = FrozenCopy(site.segments, site.value, site.out).to(self.site.device)
        self.numbers["epoch"] = 0.0
        self.client = build_client("pcat", site, plan.width, plan.blocks)
        self.nets.add("client", self.client, plan.lr)
        self.nets.defenses["client"] = self.client.defenses
        if not site.makes_scores:
            self.nets.add("head", build_head(site, plan.width, plan.blocks), plan.lr)

    def send(self, message: Message) -> Message:
        """Learn when the honest gradient is sent, before the party's segments take their step.

        Return the message unchanged.
        """
        replica = message.stamp.replica
        due = message.stamp.phase == "train" and message.kind == "gradient" and message.edge == self.site.edge
        if due and replica in self._arrived:
            self._learn(replica, self._arrived.pop(replica))
        return message

    def learn(self, seen: Seen, modules: Mapping[str, nn.Module], random: torch.Generator) -> None:
        """Take a step against the party's current segments, with the labels that arrived.

        If no gradient is sent back, the step is taken after the party's own step.
        """
        self.numbers["epoch"] = float(seen.epoch)
        if self.steps <= self.plan.start or self.plan.after is not None:
            return
        self.own.follow(modules)
        if seen.y is None:
            rows = self.site.draw_rows(len(seen.z), random)
        else:
            rows = same_labels(self._auxiliary_rows()[1].cpu(), seen.y.long().view(-1).cpu(), random)
        self.means.add(auxiliary_task=self._follow(rows.to(self.site.device), self.steps))

    def _follow(self, rows: Tensor, number: int) -> Tensor:
        x, y = self._auxiliary_rows()
        imitated = self.client.in_training(self.scale.up(x[rows]), number, int(self.numbers["epoch"]))
        release = self.own(imitated.release)
        head = self.nets.get("head")
        task = loss_of(release if head is None else head(release), y[rows])
        self.nets.descend(dict.fromkeys(self.nets, imitated.loss(task)))
        self.client.defenses.learn()
        return task

    def _release(self, x: Tensor, number: int) -> Tensor:
        """Return the pseudo-client's release of scaled rows x (n, *shape) at draw `number`."""
        found: Tensor = self.client(self.scale.up(x), number)
        return found

    def _expected_release(self, x: Tensor) -> Tensor:
        """Return the pseudo-client's release of scaled rows x with every defense at its mean, differentiable in x."""
        return self.client.expected(self.scale.up(x))

    def _auxiliary_rows(self) -> tuple[Tensor, Tensor]:
        known = self.site.knowledge
        return self.scale.down(unwrap(known.auxiliary)), unwrap(known.auxiliary_labels).long().view(-1)

    def predict(self, view: View, target: Target) -> Tensor:
        """Return (victims, *shape) from an inverse of the pseudo-client, or scores of labels (victims, classes).

        The attack's networks are not changed, so that repeated calls return the same.
        """
        z = self.site.released(view)
        labels = target is Target.LABELS
        return self._answer_on_copy(view, lambda random: self._labels(z) if labels else self._invert(z, random))

    def classify(self, view: View, x: Tensor) -> Tensor:
        """Return the stolen model's scores of x (n, *shape): (n, classes).

        It is the pseudo-client with defenses at their mean, the party's segments in the view, and the pseudo-head if
        any.
        """
        return self._answer_on_copy(
            view, lambda _: self._labels(self._expected_release(self.scale.down(x.to(self.site.device))))
        )

    def _answer_on_copy(self, view: View, answer: Callable[[torch.Generator], Tensor]) -> Tensor:
        kept = self.state()
        with torch.enable_grad(), stream(derive(self.site.seed, "guess"), self.site.device):
            self.own.follow(view.segments)
            random = generator(self.site.seed, "guess draws")
            for number in range(self.plan.after or 0):
                self._follow(self.site.draw_rows(64, random).to(self.site.device), -1 - number)
            with evaluation_mode(*self.nets.values()):  # as what arrives after training is made
                found = answer(random)
        self.load_state(kept)
        return found.detach()

    def _labels(self, z: Tensor) -> Tensor:
        scores = self.own(z)
        return self.nets["head"](scores) if "head" in self.nets else class_scores(scores)

    def _invert(self, z: Tensor, random: torch.Generator) -> Tensor:
        plan, shape = self.plan, self.site.knowledge.shape
        inverse = Translator(self.site.shape, shape, plan.width, plan.blocks)
        optimizer = torch.optim.Adam(inverse.to(self.site.device).parameters(), lr=plan.inverse_lr)
        x = self._auxiliary_rows()[0]
        for number in range(plan.inverse_steps):
            rows = self.site.draw_rows(64, random).to(self.site.device)
            with torch.no_grad():
                release = self._release(x[rows], -1 - (plan.after or 0) - number)
            take_step(optimizer, functional.mse_loss(inverse(release), x[rows]))
        coarse = inverse(z).clamp(-1, 1) if self.scale.bounded else inverse(z)
        return self.scale.up(self._refine(coarse, z, random))

    def _refine(self, x: Tensor, z: Tensor, random: torch.Generator) -> Tensor:
        """Return rows near x (n, *shape) whose release by the pseudo-client approximates z (n, ...).

        Defenses are at their mean. The rows stay in the value range if there is one.
        """
        plan, value = self.plan, self.site.value
        x = x.detach().requires_grad_()

        def mean(x: Tensor) -> dict[str, Tensor]:
            return {value: self._expected_release(x)}

        def sample(x: Tensor) -> dict[str, Tensor]:
            number = int(torch.randint(1 << 30, (1,), generator=random))
            return {value: self._release(x, -1 - number)}

        search = Search({value: z}, mean, sample, tv=0.0, l2=0.0, smoothness=_SMOOTHNESS / self.scale.unit**2)
        optimizer = torch.optim.Adam([x], lr=plan.refine_lr)
        if self.scale.bounded:
            optimizer.register_step_post_hook(lambda *_: _box(x))
        search.advance(x, optimizer, plan.refine)
        return x


def same_labels(labels: Tensor, wanted: Tensor, random: torch.Generator) -> Tensor:
    """Return for each of `wanted` (rows,) the position of a random row with this label: (rows,).

    If no row of `labels` has it, the position of any row.
    """
    places = {label: (labels == label).nonzero().flatten() for label in wanted.unique().tolist()}
    chance = torch.rand(wanted.shape, generator=random)
    found = torch.empty_like(wanted)
    for row, label in enumerate(wanted.tolist()):
        among = places[label] if len(places[label]) else torch.arange(len(labels))
        found[row] = among[int(chance[row] * len(among))]
    return found


def _box(x: Tensor) -> None:
    x.data.clamp_(-1, 1)
