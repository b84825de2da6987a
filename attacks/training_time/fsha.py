"""Feature-space hijacking: an active server sends gradients that train the client to an encoder it can decode.

Paper: Pasquini, Ateniese, Bernaschi, "Unleashing the tiger: inference attacks on split learning", CCS 2021.

At every step the party trains an encoder and a decoder of the auxiliary images (mean squared error), and a critic that
distinguishes encodings from the client's releases (Wasserstein, gradient penalty 500); the client gets the gradient of
the critic's mean instead of the task's, so that its releases become decodable. All of the step's gradients are taken
before any of its updates. The client's own optimizer decides its rate; the authors' is Adam at 1e-5. Encodings pass the
run's defenses, drawn by the attacker, before critic and decoder see them.

`disguise` adapts to detectors: the honest gradient is sent in a step in which it is more than that many times as long
as usual (as when a client sends wrong labels as a test), and in the first `start` steps, after which the gradients of
wrong labels are distinguishable.

On images the networks are the authors' (`splitfed.attacks.training_time.fsha_networks`), narrower by default; elsewhere
generic residual ones. `per_channel` computes the critic's slope as the authors' code does: its length in every channel
of the cut is held at one, whereas the gradient penalty that they cite holds the length over the whole row. The effect
of a client's distance correlation depends on the ratio of both gradients, which changes with the width of the cut:
`splitfed.attacks.training_time.gradient_ratio` measures it and scales the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from splitfed.attacks.base import Budgets, DefenseEffect, Target, unwrap
from splitfed.attacks.networks.networks import Critic, Scale, Translator
from splitfed.attacks.training_time.attack_site import AttackSite
from splitfed.attacks.training_time.fsha_networks import fsha_critic, fsha_decoder, fsha_encoder
from splitfed.attacks.training_time.training_attack import Seen, TrainingAttack, TrainingAttackState
from splitfed.core.errors import InvalidInput, require_count, require_number
from splitfed.core.messages import View

_MEMORY = 0.9  # of the running mean of the honest gradient's length


@dataclass(frozen=True)
class Fsha(TrainingAttack):
    """Trains encoder and decoder at rate `lr`, and the critic at `critic_lr`, with a `penalty` on its slope.

    `momentum`: of the critic. `width` and `blocks` of the networks (on images: of the critic; the decoder has `width`
    too); `per_channel`: whether the slope is computed for every channel separately; `strength`: factor of the gradient
    sent, for clients whose optimizer depends on its length; `disguise`: None, or a number above one; `start`: number of
    honest steps.
    """

    active: ClassVar[bool] = True
    adapts_to = frozenset({DefenseEffect.RELEASE})
    budgets: ClassVar[Budgets] = {
        "quick": {"lr": 1e-3, "critic_lr": 3e-3, "width": 24, "blocks": 1, "penalty": 10.0, "momentum": 0.5},
        "full": {
            "lr": 1e-5,
            "critic_lr": 1e-4,
            "width": 256,
            "blocks": 6,
            "penalty": 500.0,
            "momentum": 0.9,
            "per_channel": True,
        },
    }

    lr: float = field(default=1e-3, metadata=require_number("fsha lr", low=0.0, open_low=True))
    critic_lr: float = field(default=1e-3, metadata=require_number("fsha critic_lr", low=0.0, open_low=True))
    penalty: float = field(default=500.0, metadata=require_number("fsha penalty", low=0.0))
    width: int = field(default=24, metadata=require_count("fsha width", low=1))
    blocks: int = field(default=1, metadata=require_count("fsha blocks", low=1))
    momentum: float = field(default=0.9, metadata=require_number("fsha momentum", low=0.0, high=1.0, open_high=True))
    strength: float = field(default=1.0, metadata=require_number("fsha strength", low=0.0, open_low=True))
    disguise: float | None = field(default=None, metadata=require_number("fsha disguise", low=1.0, open_low=True))
    start: int = field(default=0, metadata=require_count("fsha start"))
    per_channel: bool = False

    def enter(self, site: AttackSite) -> TrainingAttackState:
        """Return the state; raise `InvalidInput` for a party that sends no gradient back."""
        if not site.returns:
            raise InvalidInput(f"fsha replaces the gradient that {site.party!r} returns, and none goes back here")
        return Hijacker(self, site)


class Hijacker(TrainingAttackState):
    """State of FSHA: networks `encoder`, `decoder`, `critic`."""

    plan: Fsha
    active: ClassVar[bool] = True

    def build(self) -> None:
        """Build the three networks."""
        plan, known = self.plan, self.site.knowledge
        self.scale = Scale(known.value_range)
        image, cut, size = known.shape, self.site.shape, (plan.width, plan.blocks)
        encoder: nn.Module
        decoder: nn.Module
        critic: nn.Module
        if len(image) == len(cut) == 3:
            encoder, critic = fsha_encoder(image, cut), fsha_critic(cut, *size)
            decoder = fsha_decoder(cut, image, plan.width, self.scale.bounded)
        else:
            encoder, critic = Translator(image, cut, *size), Critic(cut, *size)
            decoder = Translator(cut, image, *size, bounded=self.scale.bounded)
        self.nets.add("encoder", encoder, plan.lr)
        self.nets.add("decoder", decoder, plan.lr)
        self.nets.add("critic", critic, plan.critic_lr, plan.momentum)

    def learn(self, seen: Seen, modules: Mapping[str, nn.Module], random: torch.Generator) -> Tensor:
        """Take one step of encoder, decoder and critic; return the gradient for the client, (rows, *shape)."""
        encoder, decoder, critic = (self.nets[n] for n in ("encoder", "decoder", "critic"))
        x = self.scale.down(
            unwrap(self.site.knowledge.auxiliary)[self.site.draw_rows(len(seen.z), random).to(self.site.device)]
        )
        release = self.site.sender.release(encoder(x), self.steps)
        rebuilt = functional.mse_loss(decoder(release), x)
        z = seen.z.detach().clone().requires_grad_()
        real, own = critic(z).mean(), critic(release.detach()).mean()
        (gradient,) = torch.autograd.grad(real, z, retain_graph=True)
        slope = gradient_penalty(critic, seen.z, release.detach(), random, self.plan.per_channel)
        self.nets.descend({"encoder": rebuilt, "decoder": rebuilt, "critic": own - real + self.plan.penalty * slope})
        self.means.add(auxiliary_mse=rebuilt * self.scale.unit**2, critic_gap=real - own)
        return gradient * self.plan.strength

    def choose(self, gradient: Tensor, honest: Tensor) -> Tensor:
        """Return the hijacking gradient, or the honest one if the client seems to test the server."""
        early = self.steps <= self.plan.start
        if self.plan.disguise is None:
            return honest if early else gradient
        length, usual = float(honest.norm()), self.numbers.get("usual")
        tested = early or (usual is not None and length > self.plan.disguise * usual)
        self.numbers["usual"] = length if usual is None else _MEMORY * usual + (1 - _MEMORY) * length
        self.means.add(disguised=torch.tensor(float(tested)))
        return honest if tested else gradient

    @torch.no_grad()
    def predict(self, view: View, target: Target) -> Tensor:
        """Return the decoded releases: (victims, *shape)."""
        return self.scale.up(self.nets["decoder"](self.site.released(view)))


def gradient_penalty(
    critic: nn.Module, one: Tensor, two: Tensor, random: torch.Generator, per_channel: bool = False
) -> Tensor:
    """Return the mean of (|slope| - 1)^2 at random points between the rows of `one` and `two`, (rows, ...) each.

    `per_channel`: whether the slope's length is computed within each channel of (rows, channels, ...), not over the
    row.
    """
    share = torch.rand((len(one),), generator=random).to(one).view(-1, *[1] * (one.dim() - 1))
    between = (share * one + (1 - share) * two).detach().requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    if per_channel and slope.dim() > 2:
        slope = slope.flatten(0, 1)
    # A slope of zero has a length without a derivative.
    return ((slope.flatten(1).square().sum(1) + 1e-12).sqrt() - 1).square().mean()
