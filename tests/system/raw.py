"""A client without the SDK's checks: raw messages to both sockets that the SDK would never send."""

from __future__ import annotations

import mmap
import os
import socket
from types import TracebackType
from typing import Any, Self

import grpc
import msgpack
import numpy as np

from tierd._proto import admin_pb2_grpc, cache_pb2_grpc
from tierd._proto import cache_pb2 as pb
from tierd.core.formats.model import HANDLE, PUT_BLOCK
from tierd.core.formats.versions import FORMAT_VERSION
from tierd.errors import ERROR_KEY

CALL_S = 15.0
BLOCK_BYTES = 4096


class RawClient:
    """One session. `error_of` gives the class name of a call's error."""

    def __init__(self, target: str) -> None:
        self.socket = connect(target)
        try:
            self.hello, fds = ask(self.socket, hello())
            for fd in fds:  # the directory's descriptors, which this client does not use
                os.close(fd)
            if "token" not in self.hello:
                raise ConnectionError(f"refused: {self.hello or 'the socket was closed'}")
        except OSError:
            self.socket.close()
            raise
        # Its own connection. Clients of one process would share one, and one client's reset would
        # hit all.
        self._channel = grpc.insecure_channel(f"unix:{target}/tierd.sock", [("grpc.use_local_subchannel_pool", 1)])
        self.cache = cache_pb2_grpc.CacheStub(self._channel)
        self.admin = admin_pb2_grpc.AdminStub(self._channel)
        self.metadata = (("tierd-session", self.hello["token"]),)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
        self.socket.close()

    def call(self, method: Any, message: Any) -> Any:
        """The reply. Raises grpc.RpcError."""
        return method(message, metadata=self.metadata, timeout=CALL_S)

    def error_of(self, method: Any, message: Any) -> str:
        """The error's class name; "" for a call that succeeds."""
        try:
            self.call(method, message)
        except grpc.RpcError as error:
            trailing = dict(error.trailing_metadata() or ())
            return trailing.get(ERROR_KEY) or f"unnamed {error.code()}: {error.details()}"
        return ""

    def open_namespace(self, *, block_bytes: int = BLOCK_BYTES, model: str = "m") -> int:
        """Opens a namespace with 16 tokens a block."""
        request = pb.OpenNamespaceRequest(model=model, tokens_per_block=16, block_bytes=block_bytes)
        return int(self.call(self.cache.OpenNamespace, request).namespace)

    def reserve(
        self, namespace: int, hashes: np.ndarray, *, length: int | np.ndarray = BLOCK_BYTES
    ) -> tuple[int, np.ndarray]:
        """A reservation in the host tier and its handles."""
        group = pb.PutGroup(namespace=namespace, blocks=put_blocks(hashes, length=length).tobytes())
        reply = self.call(self.cache.Reserve, pb.ReserveRequest(groups=[group], tier=pb.TIER_KIND_HOST))
        return reply.reservation, np.frombuffer(reply.handles[0], dtype=HANDLE)

    def page(self, handle: Any, *, writable: bool) -> memoryview:
        """The mapped page of a handle."""
        reply, fds = ask(self.socket, {"op": "map", "tier": int(handle["tier"]), "segment": int(handle["segment"])})
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        memory = memoryview(mmap.mmap(fds[0], reply["bytes"], prot=protection))
        for fd in fds:
            os.close(fd)
        return memory[int(handle["offset"]) : int(handle["offset"]) + int(handle["length"])]


def put_blocks(hashes: np.ndarray, *, length: int | np.ndarray = BLOCK_BYTES, tokens: int = 16) -> np.ndarray:
    """PUT_BLOCK [n]."""
    blocks = np.zeros(len(hashes), dtype=PUT_BLOCK)
    blocks["hash"], blocks["tokens"], blocks["length"] = hashes, tokens, length
    return blocks


def connect(target: str) -> socket.socket:
    """A session socket before its hello."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(CALL_S)
    try:
        connection.connect(f"{target}/session.sock")
    except OSError:
        connection.close()
        raise
    return connection


def hello(**changed: Any) -> dict[str, Any]:
    """A hello that the daemon accepts, apart from the changes."""
    return {
        "op": "hello",
        "proto": 2,
        "format": FORMAT_VERSION,
        "sdk": "0",
        "name": "raw",
        "credential": None,
    } | changed


def ask(connection: socket.socket, message: Any) -> tuple[dict[str, Any], list[int]]:
    """Sends a message; the reply and its descriptors."""
    connection.send(message if isinstance(message, bytes) else msgpack.packb(message))
    data, fds, _, _ = socket.recv_fds(connection, 65536, 4)
    return msgpack.unpackb(data) if data else {}, list(fds)
