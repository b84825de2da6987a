"""One algorithm of each kind, as another package adds them to splitfed by entry points."""
