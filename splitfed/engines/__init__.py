"""Engines place parties and deliver messages: same interface, same results."""
