"""Benchmarks: each module is a suite of rows; run them with `make bench`."""
