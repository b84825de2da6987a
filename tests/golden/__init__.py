"""Golden runs: hashes of what small runs of everything in the registry result in, to compare two commits."""
