"""For tests, the project's and its users': a real daemon in a directory of its own."""

from tierd.testing.daemon import Daemon

__all__ = ["Daemon"]
