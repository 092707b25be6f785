"""Requests without I/O, and the values that they are made of."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.client.conftest import CLASS_BYTES, SPEC
from tierd.client.transport import requests
from tierd.client.values import About, OpenedNamespace, PutGroup, PutResult
from tierd.core.formats.block import NamespaceSpec
from tierd.errors import InvalidArgument

NS = OpenedNamespace(SPEC, id=7, digest=bytes(32), epoch=1)


def test_lengths_follow_tokens():
    """A short block's length is its share of a full block's length, unless it is given."""
    group = PutGroup(NS, np.zeros((3, 32), dtype=np.uint8), tokens=33)
    assert requests.put_lengths(group).tolist() == [CLASS_BYTES, CLASS_BYTES, CLASS_BYTES // 16]


@pytest.mark.parametrize(
    ("said", "priorities", "retention_s"),
    [
        ({}, [], []),
        ({"priority": 90}, [90], []),
        ({"priority": 0, "retention_s": 0.25}, [0], [1]),
        ({"priority": [1, 2, 3], "retention_s": 60}, [1, 2, 3], [60]),
        ({"priority": np.array([7, 8, 9]), "retention_s": [None, 1.5, 60]}, [7, 8, 9], [0, 2, 60]),
    ],
)
def test_what_is_said_of_blocks_travels(said, priorities, retention_s):
    """One value serves all blocks, or each has its own; time rounds up to seconds, and None has no limit."""
    message = requests.put_group_message(PutGroup(NS, np.zeros((3, 32), dtype=np.uint8), **said))
    assert (list(message.priorities), list(message.retention_s)) == (priorities, retention_s)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"priority": 101}, "priority: 101 is no integer from 0 to 100"),
        ({"priority": -1}, "priority: -1 is no integer"),
        ({"priority": 1.5}, "priority: 1.5 is no integer"),
        ({"priority": float("nan")}, "priority: nan is no integer"),
        ({"priority": [1, 2]}, "priority: 2 for 3 blocks"),
        ({"retention_s": 5}, "retention_s: 5 without a priority"),
        ({"priority": 1, "retention_s": 0}, "retention_s: 0 is not above 0"),
        ({"priority": 1, "retention_s": [1, 2, -3]}, "retention_s: -3 is not above 0"),
        ({"priority": 1, "retention_s": 4e8}, "retention_s: 400000000.0 is not above 0 and at most 316224000"),
        ({"priority": 1, "retention_s": [1]}, "retention_s: 1 for 3 blocks"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(said, told):
    """A wrong value is refused with field, value and limit before any message is sent."""
    with pytest.raises(InvalidArgument, match=told):
        requests.put_group_message(PutGroup(NS, np.zeros((3, 32), dtype=np.uint8), **said))


@pytest.mark.parametrize(("statuses", "stored"), [([], 0), ([1, 3], 2), ([1, 4, 1], 1), ([7], 0)])
def test_stored(statuses, stored):
    """`stored` counts the prefix without a gap; a result is true if all is stored."""
    result = PutResult(np.array(statuses, dtype=np.uint16))
    assert (result.stored, bool(result)) == (stored, stored == len(statuses))


def test_a_group_of_ones_own_is_put_as_it_is():
    """The lengths of a caller's own PutGroup are used unchanged."""
    group = PutGroup(NS, np.zeros((1, 32), np.uint8), lengths=[5])
    assert requests.sequence_put(NS, group, lengths=[7, 7]) is group


def _told(about: About, *, tells: bool) -> tuple[int, int, int, int]:
    """Bytes of a put's engine hashes, of their parent and of its tokens; and hashes per block."""
    space = OpenedNamespace(NamespaceSpec("m", max(1, len(about.tokens)), 64), id=5, digest=bytes(32))
    sent = requests.put_group_message(PutGroup(space, np.zeros((1, 32), np.uint8), about=about), with_names=tells)
    return len(sent.engine_hashes), len(sent.engine_parent), len(sent.token_ids), sent.engine_per_block


def test_what_an_engine_says_is_sent_where_it_fits():
    """Engine data goes only to a daemon with events; excess tokens are omitted, excess hashes omit all."""
    limit = requests.ABOUT_BYTES
    full, over = np.zeros(limit // 4, "<u4"), np.zeros(limit // 4 + 1, "<u4")
    assert _told(About([b"one!"], b"zero", full), tells=False) == (0, 0, 0, 0)
    assert _told(About([b"one!"], b"zero", full), tells=True) == (4, 4, limit, 1)
    assert _told(About([b"one!"], b"zero", over), tells=True) == (4, 4, 0, 1)
    assert _told(About([bytes(limit)], b"zero", full), tells=True) == (limit, 4, limit, 1)
    assert _told(About([bytes(limit + 1)], b"zero", full), tells=True) == (0, 0, 0, 0)
    assert _told(About((), b"zero", full), tells=True) == (0, 0, limit, 0)


def test_unopened_namespaces_hash_to_nothing():
    """A namespace without a digest from a daemon has no hashes."""
    unopened = OpenedNamespace(SPEC)
    assert unopened.hash([1] * 32).shape == unopened.fold([b"x"]).shape == (0, 32)
