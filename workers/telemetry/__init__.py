"""Traces and request logs: what is kept of a request, and of the steps it shares with others. No Ray."""
