"""Device memory between processes on the fake driver: descriptors over a socket, and killed peers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.unit.kernels.fake_driver import (
    SLAB,
    command,
    counts,
    entered,
    mapped,
    ok,
    on_fake_driver,
    peek,
    poke,
    refused,
    shareable,
    unmapped,
)

LIMIT_S = 30


def own_slab(descriptor: str) -> None:
    """The owner: writes memory once, unmaps it and sends it over the socket; ends with the other side."""
    cuda, peer = entered(), socket.socket(fileno=int(descriptor))
    handle = ok(cuda.cuMemCreate(SLAB, shareable(cuda), 0))
    address = mapped(cuda, handle)
    poke(address, b"\x07" * SLAB)
    unmapped(cuda, address)
    exported = ok(cuda.cuMemExportToShareableHandle(handle, kind_of(cuda), 0))
    socket.send_fds(peer, [b"slab"], [exported])
    os.close(exported)
    while peer.recv(1):
        address = mapped(cuda, handle, rights="READ")
        peer.send(peek(address + SLAB - 1, 1))
        unmapped(cuda, address)


def use_slab(descriptor: str) -> None:
    """A client: maps the received memory, reports that, and waits to be killed."""
    cuda, peer = entered(), socket.socket(fileno=int(descriptor))
    poke(mapped(cuda, imported(cuda, peer)), b"\x09" * SLAB)
    peer.send(b"!")
    peer.recv(1)


def kind_of(cuda: Any) -> Any:
    return cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def imported(cuda: Any, peer: socket.socket) -> Any:
    """The handle of a descriptor from the socket; the descriptor itself is closed."""
    _, (descriptor,), _, _ = socket.recv_fds(peer, 16, 1)
    handle = ok(cuda.cuMemImportFromShareableHandle(descriptor, kind_of(cuda)))
    os.close(descriptor)
    return handle


@contextmanager
def process(function: Any) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A process that runs the function at the other end of a socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(LIMIT_S)
    with theirs, subprocess.Popen(command(function, theirs.fileno()), pass_fds=[theirs.fileno()]) as child:
        theirs.close()
        try:
            yield child, ours
        finally:
            ours.close()
            child.wait(LIMIT_S)


@on_fake_driver(TIERD_FAKE_CUDA_BYTES=str(SLAB))
def test_a_descriptor_carries_memory_to_another_process() -> None:
    """Owner and client see each other's writes, also by a read-only mapping; only the owner is charged."""
    cuda = entered()
    with process(own_slab) as (_, peer):
        handle = imported(cuda, peer)
        assert ok(cuda.cuMemGetInfo()) == (SLAB, SLAB)
        readable, writable = mapped(cuda, handle, rights="READ"), mapped(cuda, handle)
        assert peek(readable, SLAB) == b"\x07" * SLAB
        poke(writable, b"\x08" * SLAB)
        assert peek(readable + SLAB - 1, 1) == b"\x08"
        peer.send(b"?")
        assert peer.recv(1) == b"\x08"
        ok(cuda.cuMemRelease(handle))
        unmapped(cuda, readable)
        unmapped(cuda, writable)
    assert counts() == {}


@on_fake_driver()
def test_a_mapping_outlives_its_killed_owner() -> None:
    """After SIGKILL the socket ends, and exported memory can be read, written and mapped again."""
    cuda = entered()
    with process(own_slab) as (owner, peer):
        handle = imported(cuda, peer)
        address = mapped(cuda, handle, rights="READ")
        owner.send_signal(signal.SIGKILL)
        assert peer.recv(1) == b""
        assert owner.wait(LIMIT_S) == -signal.SIGKILL
    assert peek(address + SLAB - 1, 1) == b"\x07"
    again = mapped(cuda, handle)
    poke(again, b"\x05")
    assert peek(address, 1) == b"\x05"


@on_fake_driver()
def test_a_killed_client_leaves_the_owner_what_it_had() -> None:
    """After a client is killed at any point, the owner has its memory and no extra descriptor or mapping."""
    cuda = entered()
    handle = ok(cuda.cuMemCreate(SLAB, shareable(cuda), 0))
    before, descriptors = counts(), len(os.listdir("/proc/self/fd"))
    with process(use_slab) as (client, peer):
        exported = ok(cuda.cuMemExportToShareableHandle(handle, kind_of(cuda), 0))
        socket.send_fds(peer, [b"slab"], [exported])
        os.close(exported)
        assert peer.recv(1) == b"!"
        client.send_signal(signal.SIGKILL)
        assert client.wait(LIMIT_S) == -signal.SIGKILL
    assert (counts(), len(os.listdir("/proc/self/fd"))) == (before, descriptors)
    assert peek(mapped(cuda, handle, rights="READ"), 1) == b"\x09"


@on_fake_driver()
def test_only_what_was_made_for_sharing_is_shared() -> None:
    """Memory that was not made for export is not exported, and no other descriptor is imported."""
    cuda = entered()
    prop = shareable(cuda)
    prop.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    handle = ok(cuda.cuMemCreate(SLAB, prop, 0))
    assert refused(cuda.cuMemExportToShareableHandle(handle, kind_of(cuda), 0)) == "INVALID_VALUE"
    other = os.memfd_create("other")
    assert refused(cuda.cuMemImportFromShareableHandle(other, kind_of(cuda))) == "INVALID_VALUE"
