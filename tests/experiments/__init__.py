"""Tests of what measures: tables of papers, benchmarks and the board."""
