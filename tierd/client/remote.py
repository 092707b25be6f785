"""Put and get over TCP: chunks with checksums in place of handles, encoded if that is wanted.

Purpose: the two verbs for clients that share no memory with the daemon. Non-purpose: chunks themselves (protocol.py). Invariant: a block whose
chunks did not all hold is no block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.client import buffers, protocol
from tierd.client.calls import insisted, left_s
from tierd.client.connection import Link
from tierd.client.values import GetResult, Group, PutResult
from tierd.client.writing import Write
from tierd.core.model import Need
from tierd.errors import OperatorError, Unsupported


def put(link: Link, write: Write) -> PutResult:
    """Sends blocks."""
    message, codec = protocol.put_group_message(write.group), link.codec

    def push() -> Any:
        chunks = protocol.put_chunks(message, write.sources, durable=write.durable, codec=codec)
        return link.transport.push("Put", chunks, timeout_s=left_s(write.deadline))

    reply = insisted(push, write.deadline)
    return PutResult(protocol.statuses_of(reply.statuses, count=len(write.sources)))


def get(link: Link, group: Group, out: Any, deadline: float) -> tuple[GetResult, list[int]]:
    """Receives the servable prefix, into out or into arrays of its own, and says how long its blocks are. Raises Unsupported for a group that needs anything else."""
    if group.need is not Need.PREFIX:
        raise Unsupported(
            f"get: a group that needs {group.need.name} and no prefix, over TCP, where blocks travel from the first one on; ask for a"
            " prefix, or run a daemon beside this process"
        )
    assembly = protocol.Assembly(_Targets(out, length_max=group.namespace.spec.block_bytes), codec=link.codec)
    request = protocol.get_request(group, codec=link.codec)
    insisted(lambda: link.transport.pull("Get", request, timeout_s=left_s(deadline), take=assembly.take), deadline)
    blocks = len(assembly.whole)
    covered = group.namespace.block_tokens(len(group.hashes), tokens=group.tokens)
    for array in assembly.whole if out is None else ():
        array.flags.writeable = False
    views = tuple(assembly.whole) if out is None else ()
    return GetResult(int(covered[:blocks].sum()), blocks, views), list(map(len, assembly.whole))


class _Targets:
    """Where each block's bytes go: new memory, a list of buffers, or one buffer, block behind block."""

    def __init__(self, out: Any, *, length_max: int) -> None:
        self._out = out if out is None or isinstance(out, list | tuple) else buffers.flat(out, writable=True)
        self._length_max = length_max
        self._used = 0

    def __call__(self, index: int, length: int) -> NDArray[np.uint8]:
        if length > self._length_max:
            raise OperatorError(
                f"daemon: block {index} of {length} bytes in a namespace of {self._length_max}; versions differ?"
            )
        if self._out is None:
            return np.empty(length, dtype=np.uint8)
        if isinstance(self._out, list | tuple):
            return buffers.pieces(list(self._out[index : index + 1]), [length], writable=True)[0]
        begin, self._used = self._used, self._used + length
        return buffers.pieces(self._out[begin:], [length], writable=True)[0]
