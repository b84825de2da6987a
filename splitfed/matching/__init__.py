"""ExpertMatcher: finds the expert model that fits a client's data, from codes instead of the data; imported on use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitfed.core.lazy_package import make_lazy

if TYPE_CHECKING:
    from splitfed.matching.autoencoder import Autoencoder as Autoencoder
    from splitfed.matching.client import Client as Client
    from splitfed.matching.matcher import Match as Match, Matcher as Matcher
    from splitfed.matching.measures import MEASURES as MEASURES
    from splitfed.matching.repository import Expert as Expert, Repository as Repository

make_lazy(__name__)
