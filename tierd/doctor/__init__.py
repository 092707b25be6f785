"""Checks of a machine for a daemon, before one runs or beside it."""
