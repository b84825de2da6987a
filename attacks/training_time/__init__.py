"""Attacks that act inside training."""
