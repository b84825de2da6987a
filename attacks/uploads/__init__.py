"""Attacks on what clients of a federated method send."""
