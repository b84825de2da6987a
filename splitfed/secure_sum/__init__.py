"""Secure sums: a server learns what its clients' uploads add up to, and no upload."""

from typing import TYPE_CHECKING

from splitfed.core.lazy_package import make_lazy

if TYPE_CHECKING:
    from splitfed.secure_sum.base import SecureSumPlan as SecureSumPlan
    from splitfed.secure_sum.masked_sum import SecureSum as SecureSum

make_lazy(__name__)
