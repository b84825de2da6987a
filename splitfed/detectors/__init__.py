"""Detectors: how a client detects that received gradients do not serve its task; one a file, imported on first use."""

from typing import TYPE_CHECKING

from splitfed.core.lazy_package import make_lazy

if TYPE_CHECKING:
    from splitfed.detectors.base import Detector as Detector
    from splitfed.detectors.splitguard import SplitGuard as SplitGuard
    from splitfed.detectors.splitout import SplitOut as SplitOut

make_lazy(__name__)
