"""Training: `train()`, the run that it returns, its folder, checkpoints, and what identifies a run."""
