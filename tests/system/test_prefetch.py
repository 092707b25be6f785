"""Prefetches of clients over a daemon's socket: intent, time to live, and cancelling."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.system.blocks import SOON_S
from tests.system.kit import eventually
from tests.system.test_encoded_stores import evict
from tests.system.warm import Daemon
from tierd.cli.hits import prefetched_of
from tierd.client import BlockStatus, Client, NamespaceSpec, OpenedNamespace, Prefetch, Target
from tierd.errors import InvalidArgument
from tierd.testing import chain

BLOCK_BYTES = 64 << 10
CONFIG = """\
[[host]]
capacity = "16 MiB"
segment = "4 MiB"

[[nvme]]
capacity = "16 MiB"
segment = "4 MiB"
admission = "all"

[mover]
batch_blocks = 1
transfer_limit = 1
"""
SPEC = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=BLOCK_BYTES)
NAMES = chain(1, 8)
READ = "mover.load.before_verify"
