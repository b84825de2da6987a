"""Poisonings: clients that misbehave, one way a file, and what it does to the model."""

from splitfed.poisoning.backdoor import Backdoor
from splitfed.poisoning.base import Poisoning
from splitfed.poisoning.byzantine_noise import ByzantineNoise
from splitfed.poisoning.effect import Effect, effect, success_rate
from splitfed.poisoning.gradient_replacement import GradientReplacement
from splitfed.poisoning.label_flip import LabelFlip
from splitfed.poisoning.malicious_optimizer import MaliciousOptimizer
from splitfed.poisoning.replay import Replay
from splitfed.poisoning.scaling import Scaling
from splitfed.poisoning.sign_flip import SignFlip

__all__ = [
    "Backdoor",
    "ByzantineNoise",
    "Effect",
    "GradientReplacement",
    "LabelFlip",
    "MaliciousOptimizer",
    "Poisoning",
    "Replay",
    "Scaling",
    "SignFlip",
    "effect",
    "success_rate",
]
