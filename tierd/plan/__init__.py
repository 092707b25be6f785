"""How much memory and disk a model's KV cache takes, what it brings, and what it costs."""
