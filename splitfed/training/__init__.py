"""Training: `train()`, the run that it returns, its folder, checkpoints, and what identifies a run."""

from splitfed.core.deprecation import forwarded

__getattr__ = forwarded("splitfed.training", "splitfed.training.entry_point", ("train",))
