"""Networks and layouts that several attacks share."""

from splitfed.old_names import forwarded

__getattr__ = forwarded("splitfed.attacks.networks", "splitfed.attacks.networks.networks")
