"""Costs of a run: bytes, operations, memory, simulated time, and the formulas of the papers."""
