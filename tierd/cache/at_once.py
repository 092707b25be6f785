"""Coroutines that do not wait: carried out where they are made, not in a task that has its turn later.

Purpose: `done_at_once`. Non-purpose: one that waits, which is a fault of its caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def done_at_once(work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """What came of it, as of a task that has ended. Raises RuntimeError where it waits."""
    done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    try:
        work.send(None)
    except StopIteration as end:
        done.set_result(end.value)
    except Exception as error:  # noqa: BLE001 - it is for who asks what came of it
        done.set_exception(error)
    else:
        work.close()
        raise RuntimeError(f"{work!r:.80}: it waits, and was to be done at once")
    return done
