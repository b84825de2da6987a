"""Secure sums: a server learns what its clients' uploads add up to, and no upload."""

from splitfed.secure_sum.base import SecureSumPlan
from splitfed.secure_sum.encrypted_sum import EncryptedSum
from splitfed.secure_sum.plan import SecureSum

__all__ = ["EncryptedSum", "SecureSum", "SecureSumPlan"]
