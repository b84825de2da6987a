"""Prints all benchmarks: `python -m experiments.benchmarks`."""

from experiments.benchmarks.steps import main

main()
