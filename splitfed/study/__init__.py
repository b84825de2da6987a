"""Studies: a grid of runs described by one TOML file, checked as a whole, resumable, ending in one report."""
