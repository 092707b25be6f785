"""Every SDK verb with odd arguments: it works or raises a TierdError; best effort never raises.

`FUZZ_SEED=` runs the calls of another seed; a failure prints the call.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from tests.depth import count, report
from tests.system.sdk import HOST, await_nothing_held, put, right
from tests.system.warm import Daemon
from tierd.client import (
    About,
    AsyncClient,
    Client,
    Group,
    KVGeometry,
    Lease,
    NamespaceSpec,
    Need,
    OpenedNamespace,
    Prefetch,
    PutGroup,
)
from tierd.errors import TierdError
from tierd.testing import chain

SEED = os.environ.get("FUZZ_SEED", "1")
CALLS = count(test=2000, nightly=20_000, weekly=100_000)
KEPT = 77
HUGE = 10**400
ODD: list[Any] = [
    None, -1, 0, 1, 7, 2**31, 2**32, 2**63, 2**64, HUGE, -HUGE, 0.5, math.nan, math.inf, -math.inf, 1e300, True, "", "x", "host.99999999", "\0", "\ud800",
    "é" * 5000, b"", b"x" * 31, b"x" * 32, [], [1], [-1], [2**32], [2**64], [1.5], [None], ["a"], [[1], [2, 3]], (), {}, {1: 2}, {3}, object(), range(40),
    np.zeros(0), np.zeros(3), np.array(5), np.array([-1]), np.array([2**40]), np.zeros((2, 31), np.uint8), np.zeros((3, 32), np.uint8), np.zeros((2, 32), np.int8),
    np.zeros(64, np.uint8)[::2], bytearray(3), memoryview(b"abcd"), [bytearray(1)] * 3, [b""], lambda: 1, int, Need.LAST_STATE, iter([1]),
]  # fmt: skip
"""Mostly invalid values, and some valid ones."""
SPEC = NamespaceSpec(model="odd", tokens_per_block=16, block_bytes=4096, rank_count=2)
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Calls:
    """Good calls with up to two changed arguments."""

    def __init__(self, namespace: OpenedNamespace, seed: str) -> None:
        self.namespace, self.chance, self.turn = namespace, random.Random(seed), 0
        self.lease: Any = None

    def __iter__(self) -> Iterator[Call]:
        for self.turn in range(CALLS):
            name = self.chance.choice(sorted(VERBS))
            yield name, *self.odd(*VERBS[name](self))

    def odd(self, arguments: list[Any], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replaces no, one or two arguments."""
        for _ in range(self.chance.choice((0, 1, 1, 1, 2))):
            if self.chance.random() < len(arguments) / (len(arguments) + len(options)):
                arguments[self.chance.randrange(len(arguments))] = self.chance.choice(ODD)
            else:
                options[self.chance.choice(sorted(options))] = self.chance.choice(ODD)
        return tuple(arguments), options

    def maybe(self, value: Any, share: float = 0.95) -> Any:
        """The value, or an odd one."""
        return value if self.chance.random() < share else self.chance.choice(ODD)

    def hashes(self) -> Any:
        return chain(self.chance.randrange(20), 3)

    def tokens(self) -> Any:
        first = self.chance.randrange(20)
        return self.chance.choice((list, np.array, tuple))(range(first, first + 40))

    def group(self) -> Any:
        ns, some = self.namespace, self.maybe
        tokens = self.chance.choice((None, 40, 48))
        need = self.chance.choice(list(Need))
        name = some("request-7")
        return Group(some(ns), some(self.hashes()), some(tokens), some((0, 1)), some(need), some(16), request=name)

    def put_group(self) -> Any:
        ns, some, hashes = self.namespace, self.maybe, self.hashes()
        more = {"parent": some(bytes(32)), "position": some(3), "about": some(About(tokens=range(48)))}
        more |= {"priority": some(50), "retention_s": some(3.0), "lengths": some([4096] * 3), "rank": some(1)}
        kept = self.chance.sample(sorted(more), self.chance.randrange(len(more)))
        return PutGroup(some(ns), some(hashes), **{name: more[name] for name in kept})

    def spec(self) -> Any:
        some = self.maybe
        shape = KVGeometry(some(1), some(2), some(8), some("bf16"), some("NHD"))
        return NamespaceSpec(
            some("odd"), some(24), some(1000), some("w"), some("a"), some("g"), some("s"), some(2), some(shape)
        )


VERBS: dict[str, Callable[[Calls], tuple[list[Any], dict[str, Any]]]] = {
    "open_namespace": lambda c: ([c.spec()], {"timeout_s": 5}),
    "lookup": lambda c: ([c.maybe([c.group()], 0.5), None], {"tokens": None, "timeout_s": 5}),
    "prefetch": lambda c: ([c.namespace, c.hashes()], {"tokens": 40, "tier": "host", "timeout_s": 5}),
    "acquire": lambda c: ([[c.group(), c.group()], None], {"tokens": None, "tier": "host", "timeout_s": 5}),
    "acquire_by_layer": lambda c: ([c.maybe([c.group()], 0.7)], {"tier": "host", "timeout_s": 5}),
    "cancel": lambda c: ([c.maybe(Prefetch.of(2, (1, 2)), 0.7)], {"timeout_s": 5}),
    "get": lambda c: (
        [c.namespace, c.chance.choice((c.tokens, c.hashes, c.group))()],
        {"out": c.chance.choice((None, bytearray(3 * 4096), [bytearray(4096) for _ in range(3)])), "request": "r", "timeout_s": 5},
    ),
    "reserve": lambda c: ([c.put_group()], {"tier": "host", "timeout_s": 5}),
    "put": lambda c: (
        [c.namespace, c.chance.choice((c.tokens, c.hashes, c.put_group))(), [c.maybe(bytes(4096), 0.95) for _ in range(3)]],
        {"durable": False, "wait": c.chance.random() < 0.5, "timeout_s": 5},
    ),
    "flush": lambda c: ([], {"timeout_s": 5}),
    "connect": lambda c: ([], {"timeout_s": 5}),
    "report_attention": lambda c: (
        [c.lease, np.ones((1, c.lease.groups[0].handles.size if c.lease else 3), np.float32)],
        {"group": 0, "timeout_s": 5},
    ),
}  # fmt: skip
"""Good arguments of each verb, in new objects."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """The daemon of all calls, with blocks that must stay."""
    with Daemon("nvme = []\n" + HOST.replace("32 MiB", "64 MiB")) as running, Client(running.target) as client:
        assert put(client, client.open_namespace(NamespaceSpec("kept", 16, 4096)), KEPT, 4)
        yield running


def check(daemon: Daemon) -> None:
    """Checks that nothing is held and the kept blocks are right."""
    with Client(daemon.target) as client:
        assert (
            right(client.get(client.open_namespace(NamespaceSpec("kept", 16, 4096)), chain(KEPT, 4)).views, KEPT) == 4
        )
    await_nothing_held(daemon, "all clients")
    assert "Traceback" not in daemon.log


def note(tally: Counter[str], call: Call, error: BaseException | None, *, best_effort: bool) -> None:
    """Counts a call's outcome. Any error but a TierdError fails; with best effort every error fails."""
    name = type(error).__name__ if error else "OK"
    tally[f"{call[0]} {name}"] += 1
    if error is not None and (best_effort or not isinstance(error, TierdError)):
        raise AssertionError(f"{call[0]}(*{call[1]!r:.2000}, **{call[2]!r:.500})") from error


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("best_effort", [False, True])
def test_client(daemon: Daemon, best_effort: bool) -> None:
    """A verb of Client works or raises a TierdError; with best effort it never raises."""
    tally: Counter[str] = Counter()
    with Client(daemon.target, best_effort=best_effort) as client:
        calls = Calls(client.open_namespace(SPEC), f"{SEED}/{best_effort}")
        for call in calls:
            try:
                given = getattr(client, call[0])(*call[1], **call[2])
                if call[0] == "reserve" and given and calls.turn % 2:
                    given.commit(*calls.odd([None], {"timeout_s": 5})[0])
                calls.lease = given if call[0] == "acquire" else calls.lease
                error = None
            except Exception as raised:
                error = raised
            note(tally, call, error, best_effort=best_effort)
        calls.lease = given = None
    report("fuzz sdk", best_effort=best_effort, **dict(tally.items()))
    assert {f"{verb} OK" for verb in VERBS} <= set(tally)
    assert best_effort or {f"{verb} InvalidArgument" for verb in VERBS if verb != "report_attention"} <= set(tally)
    check(daemon)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("best_effort", [False, True])
async def test_async_client(daemon: Daemon, best_effort: bool) -> None:
    """The same holds for AsyncClient with eight verbs at a time."""
    tally: Counter[str] = Counter()
    async with AsyncClient(daemon.target, best_effort=best_effort) as client:
        calls = Calls(await client.open_namespace(SPEC), f"{SEED}/async/{best_effort}")
        each = iter(calls)
        while batch := list(islice(each, 8)):
            work = (getattr(client, name)(*arguments, **options) for name, arguments, options in batch)
            for call, end in zip(batch, await asyncio.gather(*work, return_exceptions=True), strict=True):
                calls.lease = end if call[0] == "acquire" and isinstance(end, Lease) and end else calls.lease
                note(tally, call, end if isinstance(end, BaseException) else None, best_effort=best_effort)
            end = work = None
        calls.lease = None
    assert {f"{verb} OK" for verb in VERBS} <= set(tally)
    await asyncio.to_thread(check, daemon)


def test_every_verb_is_fuzzed() -> None:
    """The fuzzer covers every verb of both clients that waits and takes arguments."""
    for kind in (Client, AsyncClient):
        verbs = {name for name, verb in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
        assert verbs - {"close", "watch", "introduce", "note_computed"} == set(VERBS)


@pytest.mark.parametrize("timeout_s", [math.inf, 1e300, HUGE, 2**40], ids=["inf", "1e300", "huge", "2^40"])
def test_timeouts_that_never_pass(daemon: Daemon, timeout_s: float) -> None:
    """With an infinite or huge timeout every verb works."""
    with Client(daemon.target, timeout_s=timeout_s) as client:
        ns = client.open_namespace(SPEC)
        tokens = np.arange(48)
        assert client.put(ns, tokens, [bytes(4096)] * 3)
        assert client.get(ns, tokens).tokens == client.lookup(ns, ns.hash(tokens)).tokens == 48
        with client.reserve(PutGroup.private(ns, 1), timeout_s=timeout_s) as pages:
            pages.buffer(0)[:] = 1
            assert pages.commit(ns.naming(chain(9, 1), index=[0]), timeout_s=timeout_s).statuses.tolist() in ([1], [3])


@pytest.mark.parametrize("timeout_s", [math.nan, "soon", [1], object()])
def test_timeouts_that_are_none(daemon: Daemon, timeout_s: Any) -> None:
    """A timeout that is no number is refused with its value, and is a miss with best effort."""
    with Client(daemon.target) as client, Client(daemon.target, best_effort=True) as careless:
        ns, other = client.open_namespace(SPEC), careless.open_namespace(SPEC)
        with pytest.raises(TierdError, match="timeout_s: .* is no number"):
            client.get(ns, np.arange(48), timeout_s=timeout_s)
        assert not careless.get(other, np.arange(48), timeout_s=timeout_s)
