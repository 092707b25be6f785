"""The peers of the threat table, each in its own process: strangers, scribbling writers, readers."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import numpy as np

from tests.system.blocks import BlockClient
from tests.system.elsewhere import Talk
from tests.system.raw import BLOCK_BYTES, ask
from tierd._proto import cache_pb2 as pb
from tierd.client import Client, NamespaceSpec
from tierd.core.formats.model import HANDLE
from tierd.testing import chain

NAMES = chain(31, 4)
SPEC = NamespaceSpec(model="m", tokens_per_block=16, block_bytes=BLOCK_BYTES)


def stranger(talk: Talk, target: str, *, files: list[str], namespace: int, **known: Any) -> None:
    """Tries every attack that its knowledge allows, and says the results."""
    with BlockClient(target) as raw, Client(target) as client:
        mapped = sum(is_mapped(raw, tier, segment) for tier in (0, 1) for segment in range(64))
        foreign = pb.Group(namespace=namespace, hashes=NAMES.tobytes())
        errors = [
            raw.error_of(raw.cache.Lookup, pb.LookupRequest(groups=[foreign])),
            raw.error_of(raw.cache.Acquire, pb.AcquireRequest(groups=[foreign], tier=pb.TIER_KIND_HOST)),
            raw.error_of(raw.cache.Reserve, pb.ReserveRequest(groups=[pb.PutGroup(namespace=namespace)], tier=1)),
        ]
        tokens = client.lookup(client.open_namespace(SPEC), NAMES).tokens
        numbers = []
        if known:
            raw.call(raw.cache.Release, pb.ReleaseRequest(leases=[known["lease"]]))
            raw.call(raw.cache.Abort, pb.AbortRequest(reservation=known["reservation"]))
            numbers.append(raw.error_of(raw.cache.Commit, pb.CommitRequest(reservation=known["reservation"])))
            raw.metadata = (("tierd-session", known["token"]),)
            numbers.append(raw.error_of(raw.cache.Lookup, pb.LookupRequest(groups=[foreign])))
        opened = [path for path in files if opens(path)]
        talk.say({"mapped": mapped, "errors": errors, "tokens": tokens, "numbers": numbers, "opened": opened})


def is_mapped(raw: BlockClient, tier: int, segment: int) -> bool:
    reply, fds = ask(raw.socket, {"op": "map", "tier": tier, "segment": segment})
    for fd in fds:
        os.close(fd)
    return bool(reply["ok"] or fds)


def opens(path: str) -> bool:
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        return True
    return False


def scribbler(talk: Talk, target: str) -> None:
    """Commits NAMES, then changes the third block."""
    client = BlockClient(target)
    reservation, handles = client.reserve(client.open_namespace(), NAMES)
    client.write(handles, NAMES)
    client.call(client.cache.Commit, pb.CommitRequest(reservation=reservation))
    client.page(handles[2], writable=True)[5] ^= 1
    talk.say(len(handles))
    talk.hear()


def reader(talk: Talk, target: str) -> None:
    """Says how many blocks its get gave."""
    client = BlockClient(target)
    talk.say(client.read(client.open_namespace(), NAMES))
    talk.hear()


def copier(talk: Talk, target: str) -> None:
    """Says how many blocks it copied."""
    with Client(target) as client:
        out = np.zeros((len(NAMES), BLOCK_BYTES), np.uint8)
        talk.say(client.get(client.open_namespace(SPEC), NAMES, out=out).blocks)
    talk.hear()


def cutter(talk: Talk, target: str) -> None:
    """Stores NAMES and truncates a reserved page's file. Says: blocks stored, write right, commit's
    statuses."""
    client = BlockClient(target)
    stored, leased = client.put(client.open_namespace(), NAMES), client.acquire(client.open_namespace(), NAMES)
    reservation, handles = client.reserve(client.open_namespace(), chain(33, 4))
    replies = [
        ask(client.socket, {"op": "map", "tier": int(handle["tier"]), "segment": int(handle["segment"])})
        for handle in (leased.handles[0], handles[0])
    ]
    os.ftruncate(replies[1][1][0], 0)
    reply = client.call(client.cache.Commit, pb.CommitRequest(reservation=reservation))
    statuses = np.frombuffer(reply.handles, dtype=HANDLE)["status"].tolist()
    talk.say([stored, replies[0][0]["writable"], statuses])
    talk.hear()
