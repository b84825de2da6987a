"""Attribute and property inference."""
