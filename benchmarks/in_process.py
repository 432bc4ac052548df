"""Router, drafter and target in one process: see deployments/in_process.py."""

from deployments.in_process import InProcessLink, registration

__all__ = ["InProcessLink", "registration"]
