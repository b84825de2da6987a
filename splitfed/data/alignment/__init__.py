"""Alignment of the records of several parties by key, by keyed hash or by private set intersection."""

from splitfed.old_names import forwarded

__getattr__ = forwarded("splitfed.data.alignment", "splitfed.data.alignment.report")
