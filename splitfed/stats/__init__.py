"""Statistics: distance correlation, intervals, and what a score is worth."""
