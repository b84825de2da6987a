"""Prints all benchmarks: `python -m tests.benchmarks`."""

from tests.benchmarks.steps import main

main()
