"""The price of smaller KV: a model's predictions over decoded blocks, against those over exact ones."""
