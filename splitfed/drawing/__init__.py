"""Drawings of topologies as SVG."""
