"""Alignment of the records of several parties by key, by keyed hash or by private set intersection."""
