"""Metrics: which there are, how they are counted, and how they look when they are exported. No Ray."""
