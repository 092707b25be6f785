"""Replies without I/O."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.client.conftest import SPEC
from tierd import errors
from tierd._proto import cache_pb2 as pb
from tierd.client.transport import replies
from tierd.client.transport.replies import LeasedGroup, error_of, valid_blocks
from tierd.client.values import EventKind, OpenedNamespace
from tierd.core.formats.model import HANDLE
from tierd.errors import ERROR_KEY, GRPC_STATUS, InvalidArgument, OperatorError, TierdError
from tierd.tcp.codecs import open_codec

LZ4 = open_codec("lz4", whose="this test")


@pytest.mark.parametrize("kind", GRPC_STATUS)
def test_every_error_comes_back(kind):
    """The name in the trailing metadata gives the same class back, with its message."""
    error = error_of(kind.__name__, "thing: fault", status=GRPC_STATUS[kind])
    assert (type(error), str(error)) == (kind, "thing: fault")


@pytest.mark.parametrize("name", [None, "", "Exception", "ERROR_KEY", "GRPC_STATUS", "annotations", "NoSuchError"])
def test_foreign_names_are_no_classes(name):
    """An unknown error name falls back to the status, and an unknown status gives OperatorError."""
    assert type(error_of(name, "m", status="UNAVAILABLE")) is errors.Unavailable
    assert type(error_of(name, "m", status="INTERNAL")) is OperatorError
    assert ERROR_KEY == "tierd-error"


@pytest.mark.parametrize(("codecs", "agreed"), [([], None), (["other"], None), (["other", "lz4"], LZ4)])
def test_a_codec_is_what_both_sides_know(codecs, agreed):
    """A codec that the daemon does not name is not used, and a client without a codec gets none."""
    reply = pb.OpenNamespaceReply(codecs=codecs)
    assert replies.agreed_codec(LZ4, reply) is agreed
    assert replies.agreed_codec(None, reply) is None


@pytest.mark.parametrize(
    ("good", "blocks"),
    [([1, 1, 1, 1, 1, 1], 3), ([1, 1, 1, 1, 0, 1], 1), ([0, 1, 1, 1, 1, 1], 0), ([1, 1, 0, 1, 1, 0], 2)],
)
def test_a_block_is_good_on_every_rank(good, blocks):
    """A block that one rank has lost is lost, with all after it."""
    group = LeasedGroup(0, np.zeros((2, 3), dtype=HANDLE))
    assert valid_blocks([group], np.array(good, dtype=np.bool_)) == blocks


def test_groups_are_good_or_not():
    """Several groups are valid all together or not at all."""
    groups = [LeasedGroup(0, np.zeros((1, 2), dtype=HANDLE)), LeasedGroup(1, np.zeros((1, 1), dtype=HANDLE))]
    assert valid_blocks(groups, np.array([True, True, True])) == 2
    assert valid_blocks(groups, np.array([True, True, False])) == 0


@pytest.mark.parametrize("data", [bytes(39), bytes(41), bytes(80)])
def test_malformed_handles(data):
    """Handles of a wrong size raise OperatorError, not an index error."""
    with pytest.raises(OperatorError, match="use one tierd on both sides"):
        replies.handles_of(data, count=1)


@pytest.mark.parametrize("data", [b"", bytes(3), bytes(6)])
def test_malformed_statuses(data):
    """Statuses of a wrong count raise OperatorError, not a shorter answer."""
    with pytest.raises(OperatorError, match="use one tierd on both sides"):
        replies.statuses_of(data, count=2)


def test_events_come_back():
    """Each event of a message has its hashes, one row each, its kind and its sequence number."""
    name = bytes(range(32))
    sent = pb.Event(sequence=9, kind=pb.Event.KIND_STORED, tier=1, namespace=3, hashes=2 * name, reason="r")
    (event,) = replies.events_of(pb.Events(events=[sent]))
    assert (event.sequence, event.kind, event.namespace, event.hashes.tobytes()) == (9, EventKind.STORED, 3, 2 * name)
    assert (event.tier, event.reason, event.hashes.shape) == (1, "r", (2, 32))


def test_namespace_replies_are_checked():
    """A digest of the wrong length is refused."""
    reply = pb.OpenNamespaceReply(namespace=1, digest=b"x", epoch=1)
    with pytest.raises(OperatorError):
        replies.take_namespace(OpenedNamespace(SPEC), reply, link=1)
    assert issubclass(InvalidArgument, TierdError)
