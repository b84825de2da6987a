"""The standing board: topologies, cuts, defenses and the strongest attacks on three data sets, `make board`."""
