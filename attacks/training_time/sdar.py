"""SDAR: an honest server trains a simulator of the client and a decoder beside the task, both regularised by critics.

Paper: Zhu, Luo, Wu, Xiao, "Passive inference attacks on split learning via adversarial regularization", NDSS 2025;
order of updates, modes and settings checked against the authors' published code (zhxchd/SDAR_SplitNN).

After every honest step, with labelled auxiliary rows x_a and the received releases z: the simulator e goes down
CE(g(e(x_a)), y_a) + l1 BCE(D_e(e(x_a)), 1), g being the party's own segments, frozen and in evaluation mode; D_e learns
z as real and e(x_a) as fake; then the decoder d goes down MSE(d(e(x_a)), x_a) + l2 BCE(D_d(d(z)), 1), and D_d learns
x_a as real and d(z) as fake. The critics' rates are those of simulator and decoder times l1 and l2, as the authors'.
All four are in training mode while they learn; predictions come from the decoder in evaluation mode.

If labels arrive, d and both critics read them; at inference a victim's label is the server's own prediction. If they do
not (U-shaped), a head h of the attacker's own follows g, a share `flip` of the auxiliary labels is redrawn, and h(g(z))
predicts the victims' labels. The simulator's releases pass the run's defenses, drawn by the attacker, and its loss has
the defenses' factor and penalties as the client's: with distance correlation it minimises (1 - alpha) CE + alpha
DCOR(x_a, e(x_a)) + l1 BCE.

With layout "client", the authors', e has the layout of the segments upstream and h that of the client's head, weights
drawn anew; the attacker must know both. With "generic" they are residual networks built from shapes alone; as long as
no negative number arrives e then ends with batch normalisation and ReLU, as the authors' clients and simulators do,
since a critic would recognise the releases of a linear layer by any negative number. (Noise of a defense hides how the
client ends.) The authors also try a simulator without residual connections: .031 in place of .023 on CIFAR-10 at their
level 7. `normalise` takes their decoder and critics, which have batch normalisation
(`splitfed.attacks.training_time.sdar_networks`). In U-shaped runs the authors take l1 = .02 or .04 and flip 10 to 40 %
of the labels; .02 and 20 % for ResNet-20 on CIFAR-10. Runs of some hundred steps needed .2 (table `sdar`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.base import Budgets, Needs, Target, check_classes, unwrap
from splitfed.attacks.networks.frozen_copy import FrozenCopy
from splitfed.attacks.networks.networks import Critic, Scale, Translator
from splitfed.attacks.networks.substitute_client import LAYOUTS, build_client, build_head, class_scores, loss_of
from splitfed.attacks.training_time.attack_networks import evaluation_mode
from splitfed.attacks.training_time.attack_site import AttackSite
from splitfed.attacks.training_time.sdar_networks import CutCritic, ReleaseEnd, SdarCritic, SdarDecoder
from splitfed.attacks.training_time.training_attack import Seen, TrainingAttack, TrainingAttackState
from splitfed.core.errors import require_count, require_name, require_number
from splitfed.core.messages import View


@dataclass(frozen=True)
class Sdar(TrainingAttack):
    """Trains a simulator at rate `lr`, a decoder at `decoder_lr` and a label head at `head_lr`.

    `l1` and `l2`: weights of the critics of simulator and decoder; a weight of zero leaves the critic out. `flip`:
    share of auxiliary labels that is redrawn if no labels arrive. `layout` of simulator and head: "client" or
    "generic". `normalise`: whether decoder and critics are the authors', with batch normalisation, if rows and cut are
    images. `width` and `blocks`: of all networks without a layout of the client's.
    """

    learns_from: ClassVar[frozenset[Needs]] = frozenset({Needs.AUXILIARY, Needs.AUXILIARY_LABELS})
    budgets: ClassVar[Budgets] = {
        "quick": {"lr": 3e-3, "decoder_lr": 3e-3, "l1": 0.02, "l2": 1e-3, "width": 24, "blocks": 1},
        "full": {
            "lr": 1e-3, "decoder_lr": 5e-4, "l1": 0.02, "l2": 1e-5, "flip": 0.2,
            "width": 64, "blocks": 3, "layout": "client", "normalise": True,
        },
    }  # fmt: skip

    lr: float = field(default=1e-3, metadata=require_number("sdar lr", low=0.0, open_low=True))
    decoder_lr: float = field(default=5e-4, metadata=require_number("sdar decoder_lr", low=0.0, open_low=True))
    head_lr: float = field(default=1e-3, metadata=require_number("sdar head_lr", low=0.0, open_low=True))
    l1: float = field(default=0.02, metadata=require_number("sdar l1", low=0.0))
    l2: float = field(default=1e-5, metadata=require_number("sdar l2", low=0.0))
    flip: float = field(default=0.1, metadata=require_number("sdar flip", low=0.0, high=1.0))
    width: int = field(default=24, metadata=require_count("sdar width", low=1))
    blocks: int = field(default=1, metadata=require_count("sdar blocks", low=1))
    layout: str = field(default="generic", metadata=require_name("sdar layout", LAYOUTS))
    normalise: bool = False

    def enter(self, site: AttackSite) -> TrainingAttackState:
        """Return the state.

        Raises `InvalidInput` for a task without classes, or a client that cannot be redrawn or trained.
        """
        check_classes("sdar", site.knowledge.classes)
        return Simulator(self, site)


class Simulator(TrainingAttackState):
    """State of SDAR: `simulator`, `decoder`, `simulator_critic`, `decoder_critic`, and a `head`.

    There is a head only if the party's own segments compute no scores of classes.
    """

    plan: Sdar

    def build(self) -> None:
        """Build the networks that the parameters and the topology require."""
        plan, site, known = self.plan, self.site, self.site.knowledge
        self.scale = Scale(known.value_range)
        self.own = FrozenCopy(site.segments, site.value, site.out).to(self.site.device)
        classes = known.classes if site.labels is not None else None
        size = (plan.width, plan.blocks)
        self.end = None if known.architecture is not None else ReleaseEnd(site.shape)
        self.client = build_client("sdar", site, *size, end=self.end)
        self.nets.add("simulator", self.client, plan.lr)
        self.nets.defenses["simulator"] = self.client.defenses
        self.authors = plan.normalise and len(known.shape) == len(site.shape) == 3
        decoder = (
            SdarDecoder(site.shape, known.shape, *size, classes, self.scale.bounded)
            if self.authors
            else Translator(site.shape, known.shape, *size, classes=classes, bounded=self.scale.bounded)
        )
        self.nets.add("decoder", decoder, plan.decoder_lr)
        if plan.l1:
            critic = (
                CutCritic(site.shape, *size, classes) if self.authors else Critic(site.shape, *size, classes=classes)
            )
            self.nets.add("simulator_critic", critic, plan.lr * plan.l1)
        if plan.l2:
            judge = (
                SdarCritic(known.shape, plan.width, classes) if self.authors else Critic(known.shape, *size, classes)
            )
            self.nets.add("decoder_critic", judge, plan.decoder_lr * plan.l2)
        if not site.makes_scores:
            self.nets.add("head", build_head(site, *size), plan.head_lr)

    def learn(self, seen: Seen, modules: Mapping[str, nn.Module], random: torch.Generator) -> None:
        """Train the simulator against the party's newest weights, then the decoder on the newest simulator."""
        known = self.site.knowledge
        if (self.authors or self.end is not None) and len(seen.z) == 1:
            return  # a batch of one has no variance
        if self.end is not None:
            self.end.observe(seen.z)
        self.own.follow(modules)
        rows = self.site.draw_rows(len(seen.z), random).to(self.site.device)
        x, y = unwrap(known.auxiliary)[rows], unwrap(known.auxiliary_labels)[rows].long().view(-1)
        if seen.y is None:
            y = self._flip_labels(y, random)
        real = None if seen.y is None else seen.y.long().view(-1)
        self._simulate(x, y, seen._replace(y=real))
        self._decode(x, y, seen.z, real)

    def _simulate(self, x: Tensor, y: Tensor, seen: Seen) -> None:
        """Take a step of simulator, critic and head on rows x with labels y; the labels in `seen` are classes."""
        real, known_labels = seen.y, None if seen.y is None else y
        imitated = self.client.in_training(x, 2 * self.steps, seen.epoch)
        scores = self.own(imitated.release)
        head = self.nets.get("head")
        task = loss_of(scores if head is None else head(scores), y)
        loss = imitated.loss(task)
        losses = {"simulator": loss} if head is None else {"simulator": loss, "head": loss}
        if critic := self.nets.get("simulator_critic"):
            fake = critic(imitated.release, known_labels)
            losses["simulator"] = loss + self.plan.l1 * _critic_loss(fake, 1.0)
            losses["simulator_critic"] = _critic_loss(critic(seen.z, real), 1.0) + _critic_loss(fake, 0.0)
        self.nets.descend(losses)
        self.client.defenses.learn()
        self.means.add(auxiliary_task=task)

    def _decode(self, x: Tensor, y: Tensor, z: Tensor, real: Tensor | None) -> None:
        known_labels = None if real is None else y
        decoder, goal = self.nets["decoder"], self.scale.down(x)
        with torch.no_grad():
            release = self.client(x, 2 * self.steps + 1)
        rebuilt = functional.mse_loss(decoder(release, known_labels), goal)
        losses = {"decoder": rebuilt}
        if critic := self.nets.get("decoder_critic"):
            fake = critic(decoder(z, real), real)
            # The authors' images lie in [0, 1]: their weight belongs to an error a quarter of ours.
            losses["decoder"] = rebuilt + self.plan.l2 / self.scale.unit**2 * _critic_loss(fake, 1.0)
            losses["decoder_critic"] = _critic_loss(critic(goal, known_labels), 1.0) + _critic_loss(fake, 0.0)
        self.nets.descend(losses)
        self.means.add(auxiliary_mse=rebuilt * self.scale.unit**2)

    def _flip_labels(self, y: Tensor, random: torch.Generator) -> Tensor:
        """Return the labels with a random share of them redrawn uniformly from all classes."""
        drawn = torch.randint(unwrap(self.site.knowledge.classes), y.shape, generator=random).to(y.device)
        return torch.where((torch.rand(y.shape, generator=random) < self.plan.flip).to(y.device), drawn, y)

    @torch.no_grad()
    def predict(self, view: View, target: Target) -> Tensor:
        """Return the decoded releases, (victims, *shape), or the scores of the victims' labels, (victims, classes)."""
        z = self.site.released(view)
        self.own.follow(view.segments)
        head, decoder = self.nets.get("head"), self.nets["decoder"]
        with evaluation_mode(*self.nets.values()):
            scores = class_scores(self.own(z) if head is None else head(self.own(z)))
            if target is Target.LABELS:
                return scores
            return self.scale.up(decoder(z, None if self.site.labels is None else scores.argmax(1)))


def _critic_loss(scores: Tensor, wanted: float) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, wanted))
