"""Coroutines that are done where they are made."""

from __future__ import annotations

import asyncio

import pytest

from tierd.cache.at_once import done_at_once


async def _result(value: int) -> int:
    return value


async def _fault() -> int:
    raise KeyError("gone")


async def _pause() -> int:
    await asyncio.sleep(0)
    return 1


async def test_what_came_of_it_is_there_at_once() -> None:
    """A result, or what was raised."""
    done = done_at_once(_result(7))
    assert done.done()
    assert await asyncio.shield(done) == 7
    failed = done_at_once(_fault())
    with pytest.raises(KeyError):
        await failed


async def test_what_waits_is_refused() -> None:
    """It is a fault of who said that it would not."""
    with pytest.raises(RuntimeError, match="it waits"):
        done_at_once(_pause())
