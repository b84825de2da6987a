"""Attacks that reconstruct inputs from releases."""
