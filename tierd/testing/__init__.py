"""For tests of the project and of its users: a real daemon in its own directory, and blocks with
checkable bytes."""

from tierd.testing.content import chain, content_of, is_content
from tierd.testing.daemon import SMALL, Daemon
from tierd.testing.faults import Faults

__all__ = ["SMALL", "Daemon", "Faults", "chain", "content_of", "is_content"]
