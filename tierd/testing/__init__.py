"""For the project's and its users' tests: a real daemon, and blocks with checkable bytes."""

from tierd.testing.content import chain, content_of, is_content
from tierd.testing.daemon import SMALL, Daemon
from tierd.testing.faults import Faults

__all__ = ["SMALL", "Daemon", "Faults", "chain", "content_of", "is_content"]
