"""What a smaller form of KV costs: a model's predictions over decoded blocks, and over its own."""
