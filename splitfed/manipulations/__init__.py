"""Manipulations: clients that misbehave, one way a file, and what it does to the model."""

from splitfed.manipulations.backdoor import Backdoor
from splitfed.manipulations.base import Manipulation
from splitfed.manipulations.byzantine_noise import ByzantineNoise
from splitfed.manipulations.effect import Effect, effect, success_rate
from splitfed.manipulations.gradient_replacement import GradientReplacement
from splitfed.manipulations.label_flip import LabelFlip
from splitfed.manipulations.malicious_optimizer import MaliciousOptimizer
from splitfed.manipulations.replay import Replay
from splitfed.manipulations.scaling import Scaling
from splitfed.manipulations.sign_flip import SignFlip

__all__ = [
    "Backdoor",
    "ByzantineNoise",
    "Effect",
    "GradientReplacement",
    "LabelFlip",
    "MaliciousOptimizer",
    "Manipulation",
    "Replay",
    "Scaling",
    "SignFlip",
    "effect",
    "success_rate",
]
