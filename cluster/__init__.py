"""Which accelerator hosts what, how many of each, and when that changes. Knows nothing of Ray."""
