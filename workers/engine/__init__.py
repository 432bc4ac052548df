"""Loading and running Hugging Face causal language models: packed steps over a paged KV pool."""
