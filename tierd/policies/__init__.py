"""Decisions that can be exchanged: who leaves a tier, what is worth writing, what is worth fetching.

Each family is a package with one algorithm per file and one plain dict from name to class. Policies are pure: they see block ids, counts
and the order of uses, never what a tier is made of; time and seed are given to them.
"""
