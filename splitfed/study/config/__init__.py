"""The configuration of a study: its tables, their checks, and the objects they describe."""

from splitfed.old_names import forwarded

__getattr__ = forwarded("splitfed.study.config", "splitfed.study.config.config")
