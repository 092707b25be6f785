"""Decides how many of the stored tokens are worth loading, and how many are faster to compute."""
