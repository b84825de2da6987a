"""What a run costs: bytes, operations, memory, simulated time, and the formulas of the papers."""
