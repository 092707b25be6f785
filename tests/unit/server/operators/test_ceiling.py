"""Which calls are requests: an acquire after a lookup of the same prompt belongs to it."""

from __future__ import annotations

from tierd.server.operators.ceiling import LOOKUP_S, LOOKUPS, Lookups


def test_a_lookup_and_its_acquire_are_one_request() -> None:
    """Of a lookup and an acquire of one prompt the lookup counts; a second acquire counts again."""
    calls = Lookups()
    assert calls.is_request(b"a", 0.0, is_lookup=True)
    assert not calls.is_request(b"a", 1.0, is_lookup=False)
    assert calls.is_request(b"a", 2.0, is_lookup=False)
    assert calls.is_request(b"b", 3.0, is_lookup=False)


def test_two_lookups_wait_for_two_acquires() -> None:
    """Prompts that share their first block are told apart by their number."""
    calls = Lookups()
    asked = [calls.is_request(b"a", 0.0, is_lookup=is_lookup) for is_lookup in (True, True, False, False, False)]
    assert asked == [True, True, False, False, True]


def test_a_lookup_waits_for_a_minute() -> None:
    """An acquire long after the lookup is a request of its own."""
    calls = Lookups()
    calls.is_request(b"a", 0.0, is_lookup=True)
    assert calls.is_request(b"a", LOOKUP_S + 1, is_lookup=False)


def test_lookups_that_wait_are_bounded() -> None:
    """Beyond the limit the oldest lookup no longer waits."""
    calls = Lookups()
    for number in range(LOOKUPS + 1):
        calls.is_request(str(number).encode(), 0.0, is_lookup=True)
    assert calls.is_request(b"0", 0.0, is_lookup=False)
    assert not calls.is_request(b"1", 0.0, is_lookup=False)
