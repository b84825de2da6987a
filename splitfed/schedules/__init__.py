"""Schedules: how many clients share one server, one rule a file."""
