"""Codecs: smaller forms of KV blocks, each with a declared error bound.

Array math alone: no tiers, no leases, no files. FORMAT.md describes the bytes.
"""
