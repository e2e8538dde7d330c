"""kvpool: a tiered pool for LLM KV cache. The public names, nothing else."""
