"""Drawings of topologies as SVG, figures of numbers, and tables for notebooks."""
