"""The price of smaller KV: a model's predictions over decoded blocks and over exact ones."""
