"""Schedules: how many clients share one server, one rule a file."""

from splitfed.schedules.alternate import Alternate
from splitfed.schedules.blind import Blind
from splitfed.schedules.independent import Independent
from splitfed.schedules.joint import Joint
from splitfed.schedules.local_loss import LocalLoss
from splitfed.schedules.sequential import Sequential
from splitfed.schedules.sglr import Sglr
from splitfed.schedules.splitfed_v1 import SplitFedV1
from splitfed.schedules.splitfed_v2 import SplitFedV2
from splitfed.schedules.splitfed_v3 import SplitFedV3

__all__ = [
    "Alternate",
    "Blind",
    "Independent",
    "Joint",
    "LocalLoss",
    "Sequential",
    "Sglr",
    "SplitFedV1",
    "SplitFedV2",
    "SplitFedV3",
]
