"""Training: `train()`, the run that it returns, its folder, checkpoints, and what identifies a run."""

from splitfed.old_names import forwarded

__getattr__ = forwarded("splitfed.training", "splitfed.training.entry_point", ("train",))
