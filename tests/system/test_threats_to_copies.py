"""Gets that copy, in the threat table: `test_copies__<column>` shows each cell (see test_threats.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.system.blocks import connected
from tests.system.damaged import flip, pages
from tests.system.peers import NAMES, SPEC, copier, scribbler
from tests.system.raw import BLOCK_BYTES
from tests.system.threatened import FIRST_UID, SECOND_UID, TEAM, as_root, put, running, scribble, user
from tierd.checksum import raw_tables, slice_sums
from tierd.client import Client
from tierd.core.formats.block import slice_lengths
from tierd.testing import Daemon, content_of


def copied(daemon: Daemon) -> int:
    """Blocks that a client of the SDK copies, with every byte checked."""
    with Client(daemon.target) as client:
        out = np.zeros((len(NAMES), BLOCK_BYTES), np.uint8)
        blocks = client.get(client.open_namespace(SPEC), NAMES, out=out).blocks
        assert all((out[i] == content_of(NAMES[i], BLOCK_BYTES)).all() for i in range(blocks))
        return blocks


def test_copies__accident() -> None:
    """A bit that flips after any number of gets is a miss at the next copy, or a farther tier serves it."""
    with running() as daemon, connected(daemon) as client:
        put(client)
        assert [copied(daemon) for _ in range(3)] == [4] * 3
        flip(pages(daemon, NAMES)[NAMES[2].tobytes()], 9)
        assert [copied(daemon) for _ in range(2)] == [2] * 2
    with running() as daemon, connected(daemon) as client:
        put(client, durable=True)
        flip(pages(daemon, NAMES)[NAMES[2].tobytes()], 9)
        assert copied(daemon) == 4


def test_copies__buggy_same() -> None:
    """A writer's scribble is a miss at the next copy."""
    with running() as daemon, connected(daemon) as writer:
        leased = writer.acquire(put(writer), NAMES)
        assert copied(daemon) == 4
        scribble(writer, leased)
        assert copied(daemon) == 0


@as_root
def test_copies__buggy_other() -> None:
    """A scribble by another uid of the same tenant is a miss; other tenants hit nothing of the block."""
    with running(more=TEAM) as daemon, user(scribbler, daemon, FIRST_UID) as writer:
        assert writer.hear() == len(NAMES)
        with user(copier, daemon, SECOND_UID) as other:
            assert other.hear() == 2
        assert copied(daemon) == 0


def test_copies__hostile_same() -> None:
    """Not guarded: a process that writes the arena and its catalogues changes bytes and sums together."""
    with running() as daemon, connected(daemon) as client:
        put(client)
        bytes_of, wrong = pages(daemon, NAMES)[NAMES[0].tobytes()], b"wrong".ljust(BLOCK_BYTES)
        for path in daemon.arena.rglob("*.cat"):
            raw = path.read_bytes().replace(sums(content_of(NAMES[0], BLOCK_BYTES)), sums(wrong))
            with path.open("r+b") as file:
                file.write(raw)
        with bytes_of.path.open("r+b") as file:
            file.seek(bytes_of.offset)
            file.write(wrong)
        with pytest.raises(AssertionError):
            copied(daemon)


def sums(block: Any) -> bytes:
    """The slice table of a block."""
    return raw_tables([slice_sums(block, slice_lengths(BLOCK_BYTES, 0))])[0]
