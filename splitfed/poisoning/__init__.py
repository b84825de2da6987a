"""Poisonings: misbehaviour of clients, one kind a file, and its effect on the model."""

from typing import TYPE_CHECKING

from splitfed.core.lazy_package import make_lazy

if TYPE_CHECKING:
    from splitfed.poisoning.backdoor import Backdoor as Backdoor
    from splitfed.poisoning.base import Poisoning as Poisoning
    from splitfed.poisoning.byzantine_noise import ByzantineNoise as ByzantineNoise
    from splitfed.poisoning.effect import Effect as Effect, effect as effect, success_rate as success_rate
    from splitfed.poisoning.gradient_replacement import GradientReplacement as GradientReplacement
    from splitfed.poisoning.label_flip import LabelFlip as LabelFlip
    from splitfed.poisoning.malicious_optimizer import MaliciousOptimizer as MaliciousOptimizer
    from splitfed.poisoning.replay import Replay as Replay
    from splitfed.poisoning.scaling import Scaling as Scaling
    from splitfed.poisoning.sign_flip import SignFlip as SignFlip

make_lazy(__name__)
