"""For tests, the project's and its users': a real daemon in a directory of its own, and blocks whose bytes follow from their hash."""

from tierd.testing.content import chain, content_of, is_content
from tierd.testing.daemon import SMALL, Daemon
from tierd.testing.faults import Faults

__all__ = ["SMALL", "Daemon", "Faults", "chain", "content_of", "is_content"]
