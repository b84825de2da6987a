"""Attacks that reconstruct inputs from gradients of weights."""
