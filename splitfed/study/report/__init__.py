"""The report of a study."""

from splitfed.old_names import forwarded

__getattr__ = forwarded("splitfed.study.report", "splitfed.study.report.document")
