"""Ends a gRPC call with an error's name and status, or without them if the client has gone.

tierd/errors.py lists the errors; calls.py sends them for local calls. A long text never costs an
error its name. Calls that were over log no traceback.
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
"""Limit of an error's text, which may quote the client. A longer one would not fit gRPC's metadata,
and the name would be lost."""
OVER = ('Failed "execute_batch"', "CALL_ERROR_ALREADY_FINISHED", "CALL_ERROR_TOO_MANY_OPERATIONS")
"""Texts of grpc.aio's error when the call was over, or a client does not read and an earlier
message is still under way. Its other errors report wrong use."""


def said_of(error: TierdError | TimeoutError) -> TierdError:
    """The error that a client gets."""
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
    """Turns a failed send to a client that has gone into CancelledError.

    The timer of gRPC may end the call at the same moment as the daemon. The library learns of a
    call's end only after a send failed, and would log a traceback.
    """
    try:
        yield
    except grpc.aio.InternalError as error:
        if not any(said in str(error) for said in OVER):
            raise
        raise asyncio.CancelledError from error
