"""Threats: what an adversary knows, and the evaluator that runs and scores attacks."""
