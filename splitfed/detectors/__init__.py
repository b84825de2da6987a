"""Detectors: how a client may notice that the gradients it gets back do not serve the task; one a file."""

from splitfed.detectors.base import Detector
from splitfed.detectors.splitguard import SplitGuard
from splitfed.detectors.splitout import SplitOut

__all__ = ["Detector", "SplitGuard", "SplitOut"]
