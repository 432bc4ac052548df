"""Which accelerator hosts what, what fits on it, and what it will bring: arithmetic alone, without Ray and torch."""
