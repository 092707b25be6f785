"""Decisions that can be exchanged: which blocks to evict, to write and to fetch.

Each family is a package with one algorithm per file and a dict from name to class. Policies are
pure: they see block ids, counts and the order of uses. Time and seed are arguments.
"""
