"""Engines, which place parties and deliver messages, all with the same interface and the same results."""
