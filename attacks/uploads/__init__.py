"""Attacks on what clients of a federated method send."""

from splitfed.old_names import forwarded

__getattr__ = forwarded("splitfed.attacks.uploads", "splitfed.attacks.uploads.upload_attack")
