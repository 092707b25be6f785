"""Stubs generated from proto/ by tools/gen_proto.py; checked in, and compared with proto/ by a test."""
