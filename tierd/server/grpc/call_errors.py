"""How an error ends a call of gRPC: by its name, with a status, or not at all where the client has gone.

Which errors there are is said by tierd/errors.py, and lines tell theirs themselves (calls.py). A long text never
costs an error its name. No traceback is logged for a call that was over.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator
from typing import Any

import grpc

from tierd.errors import ERROR_KEY, GRPC_STATUS, RETRY_KEY, DeadlineExceeded, Overloaded, TierdError

DETAILS_LIMIT_CHARS = 500
"""Of an error's text, which may quote what the client sent: a longer one would not fit gRPC's metadata, and the error would lose its name."""
OVER = ('Failed "execute_batch"', "CALL_ERROR_ALREADY_FINISHED", "CALL_ERROR_TOO_MANY_OPERATIONS")
"""What grpc.aio's error says when the call was over before what was sent for it, or what was sent before is still under way, to a client that does not
read; its other errors say that it was used wrongly."""


def said_of(error: TierdError | TimeoutError) -> TierdError:
    """The error that a client is told."""
    if isinstance(error, TierdError):
        return error
    return DeadlineExceeded("call: its deadline passed; allow more time, or take it as a miss")


async def abort(context: Any, raised: TierdError | TimeoutError) -> None:
    """Ends the call with the error, by name."""
    error = said_of(raised)
    trailing = [(ERROR_KEY, type(error).__name__)]
    if isinstance(error, Overloaded) and error.retry_after_s:
        trailing.append((RETRY_KEY, str(math.ceil(error.retry_after_s * 1000))))
    status = getattr(grpc.StatusCode, GRPC_STATUS[type(error)])
    with unless_over():
        await context.abort(status, str(error)[:DETAILS_LIMIT_CHARS], trailing_metadata=tuple(trailing))


@contextlib.contextmanager
def unless_over() -> Iterator[None]:
    """What is sent to a client that has gone is lost, and the call ends as cancelled: gRPC's own timer may end it at the same moment as the daemon.

    grpc.aio would log a traceback: it hears of the end of a call only after what is sent for it has failed. Raises CancelledError.
    """
    try:
        yield
    except grpc.aio.InternalError as error:
        if not any(said in str(error) for said in OVER):
            raise
        raise asyncio.CancelledError from error
