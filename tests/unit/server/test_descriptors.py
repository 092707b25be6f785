"""The daemon's limit of descriptors."""

from __future__ import annotations

import resource

from tierd.server.lifecycle import allow_descriptors


def test_as_many_as_the_system_allows() -> None:
    """The daemon raises its soft limit of descriptors to the hard one."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        allow_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
