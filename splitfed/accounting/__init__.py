"""What a run costs: bytes that cross, predicted and counted."""
