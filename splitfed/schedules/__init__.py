"""Schedules: how many clients share one server, one rule a file."""

from typing import TYPE_CHECKING

from splitfed.core.lazy_package import make_lazy

if TYPE_CHECKING:
    from splitfed.schedules.alternate import Alternate as Alternate
    from splitfed.schedules.blind import Blind as Blind
    from splitfed.schedules.independent import Independent as Independent
    from splitfed.schedules.joint import Joint as Joint
    from splitfed.schedules.local_loss import LocalLoss as LocalLoss
    from splitfed.schedules.sequential import Sequential as Sequential
    from splitfed.schedules.sglr import Sglr as Sglr
    from splitfed.schedules.splitfed_v1 import SplitFedV1 as SplitFedV1
    from splitfed.schedules.splitfed_v2 import SplitFedV2 as SplitFedV2
    from splitfed.schedules.splitfed_v3 import SplitFedV3 as SplitFedV3

make_lazy(__name__)
