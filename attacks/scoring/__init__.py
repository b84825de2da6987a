"""Scores of attacks: metrics, baselines, and what only the scorer knows."""
