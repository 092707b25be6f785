"""Tokens that decoding attends to, by policy."""
