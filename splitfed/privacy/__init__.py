"""Privacy: accountants, the ledger of a run, and audits."""

from splitfed.old_names import forwarded

__getattr__ = forwarded("splitfed.privacy", "splitfed.core.privacy_events")
