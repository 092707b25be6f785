"""Scrubs of a live daemon find every planted fault in one pass; bad blocks and pages are not used."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.depth import count, report
from tests.system.blocks import SOON_S, BlockClient, await_true, connected
from tests.system.test_corruption import flip_bit
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.cli.admin import connect
from tierd.errors import Overloaded, Unavailable
from tierd.testing import chain, content_of
from tierd.tiers.store.slots import HEADER_BYTES

CONFIG = """\
[server]
shutdown_deadline = "5 s"

[[host]]
capacity = "16 MiB"
segment = "1 MiB"

[[nvme]]
capacity = "32 MiB"
segment = "4 MiB"
fault_limit = 0

[scrub]
period = "0 s"
quarantine_share = 0.5
"""
LENGTH = 32 << 10
BLOCKS = 120
"""Blocks of each chain; a session may hold half of the host tier."""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon for one test."""
    with Daemon(CONFIG) as running:
        yield running


def _namespace(client: BlockClient) -> int:
    return client.open_namespace(block_bytes=LENGTH)


def _put(daemon: Daemon, names: np.ndarray, *, durable: bool = True) -> None:
    with connected(daemon) as client:
        assert client.put(_namespace(client), names, length=LENGTH, durable=durable) == len(names)


def _scrub(daemon: Daemon, **wanted: object) -> dict[str, apb.ScrubTier]:
    """Runs a pass to its end. Returns its findings by tier."""
    with connect(daemon.target) as operator:
        *_, last = operator.follow(apb.ScrubRequest(**wanted))  # type: ignore[arg-type]
    assert last.finished
    return {tier.tier: tier for tier in last.tiers}


def _quarantine(daemon: Daemon) -> list[tuple[str, int, int, str]]:
    with connect(daemon.target) as operator:
        pages = operator.ask(apb.ScrubStatusRequest()).quarantine
    return sorted((page.tier, page.segment, page.slot, page.fault) for page in pages)


def _slots(daemon: Daemon, names: np.ndarray, tier: str) -> list[tuple[str, int, int]]:
    """The places of the blocks in a tier."""
    with connect(daemon.target) as operator:
        pages = [operator.ask(apb.InspectRequest(hash=name.tobytes().hex())).pages for name in names]
    return [(page.tier, page.segment, page.slot) for of_block in pages for page in of_block if page.tier == tier]


class Planter:
    """Flips bits of blocks while the daemon runs."""

    def __init__(self, daemon: Daemon) -> None:
        self._files = [
            path for top in (daemon.arena, daemon.root / "state") for path in top.rglob("*") if path.is_file()
        ]

    def flip(self, name: np.ndarray, *, tier: str, at: int) -> None:
        """Flips one bit, `at` bytes from the start of the block's bytes."""
        start = content_of(name, LENGTH)[:64].tobytes()
        suffix = ".slots" if tier == "nvme.0" else ".data"
        found = [(p, i) for p in self._files if p.suffix == suffix and (i := p.read_bytes().find(start)) >= 0]
        assert len(found) == 1, found
        flip_bit(found[0][0], found[0][1] + at)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(count(test=1, nightly=10, weekly=100)))
def test_every_planted_fault_is_found(daemon: Daemon, seed: int) -> None:
    """One pass finds every bit flip in pages, payloads and headers, by name and kind; gets serve none."""
    luck = random.Random(seed)
    names = chain(seed + 1, BLOCKS)
    _put(daemon, names)
    planter, bad = Planter(daemon), luck.sample(range(BLOCKS), 18)
    for number in bad[:6]:
        planter.flip(names[number], tier="host.0", at=luck.randrange(LENGTH))
    for number in bad[6:12]:
        planter.flip(names[number], tier="nvme.0", at=luck.randrange(LENGTH))
    for number in bad[12:]:  # in the header's data; after the slice table there is filler
        planter.flip(names[number], tier="nvme.0", at=-HEADER_BYTES + luck.randrange(256 + 8 * (LENGTH >> 18 or 1)))
    begun = time.monotonic()
    found = _scrub(daemon)
    report("scrub", seed=seed, pages=sum(t.pages for t in found.values()), seconds=round(time.monotonic() - begun, 3))
    assert [(found[t].pages, found[t].bad) for t in ("host.0", "nvme.0")] == [(BLOCKS, 6), (BLOCKS, 12)], f"seed {seed}"
    faults = [(tier, fault) for tier, _, _, fault in _quarantine(daemon)]
    assert sorted(faults) == [("host.0", "digest")] * 6 + [("nvme.0", "digest")] * 6 + [("nvme.0", "header")] * 6
    assert [(t.bad, t.unread) for t in _scrub(daemon).values()] == [(0, 0), (0, 0)]
    with connected(daemon) as client:
        assert client.read(_namespace(client), names) == BLOCKS, (
            f"seed {seed}: a block with a good copy is served from it"
        )
        assert [client.counter(f'tierd_corrupt_total{{tier="{t}"}}') for t in ("host.0", "nvme.0")] == [6, 12]
        assert [client.tiers()[t].pages_quarantined for t in ("host.0", "nvme.0")] == [6, 12]


def test_a_block_that_is_bad_everywhere_is_a_miss(daemon: Daemon) -> None:
    """A block that is bad in all tiers ends the prefix; after another put everything is served."""
    names = chain(1, 20)
    _put(daemon, names)
    planter = Planter(daemon)
    for tier in ("host.0", "nvme.0"):
        planter.flip(names[7], tier=tier, at=5)
    assert sum(tier.bad for tier in _scrub(daemon).values()) == 2
    with connected(daemon) as client:
        assert client.read(_namespace(client), names) == 7
    _put(daemon, names)
    with connected(daemon) as client:
        assert client.read(_namespace(client), names) == 20


def test_a_quarantined_page_is_not_used_again(daemon: Daemon) -> None:
    """When the tiers are refilled many times, no block is stored in a quarantined page."""
    names = chain(1, 60)
    with connected(daemon) as client:
        namespace = _namespace(client)
        assert client.put(namespace, names, length=LENGTH, durable=True) == 60
        planter = Planter(daemon)
        for tier in ("host.0", "nvme.0"):
            for number in (3, 30, 59):
                planter.flip(names[number], tier=tier, at=77)
        _scrub(daemon)
        bad = {(tier, segment, slot) for tier, segment, slot, _ in _quarantine(daemon)}
        assert len(bad) == 6
        for turn in range(8):
            more = chain(100 + turn, BLOCKS)
            assert client.put(namespace, more, length=LENGTH, durable=True) == BLOCKS
            for tier in ("host.0", "nvme.0"):
                assert not bad & set(_slots(daemon, more[::7], tier)), f"turn {turn}"
        assert {(tier, segment, slot) for tier, segment, slot, _ in _quarantine(daemon)} == bad


def test_a_page_that_a_read_found_bad_is_quarantined_too(daemon: Daemon) -> None:
    """A page that a read finds bad is quarantined with the reason "read"."""
    names = chain(1, 4)
    _put(daemon, names, durable=False)
    daemon.restart()
    Planter(daemon).flip(names[2], tier="host.0", at=9)
    with connected(daemon) as client:
        assert client.read(_namespace(client), names) == 2
    assert [(tier, slot, fault) for tier, _, slot, fault in _quarantine(daemon)] == [("host.0", 2, "read")]


@pytest.mark.timeout(120)
def test_in_the_background() -> None:
    """Background scrub makes a block that went bad unread a miss within a period."""
    with Daemon(CONFIG.replace('"0 s"', '"1 s"')) as daemon:
        names = chain(1, 40)
        _put(daemon, names)
        Planter(daemon).flip(names[11], tier="nvme.0", at=1000)
        with connected(daemon) as client:
            await_true(lambda: client.counter('tierd_corrupt_total{tier="nvme.0"}') == 1, "the scrub's find")
            assert client.counter("tierd_scrub_passes_total") >= 0
        assert [fault for *_, fault in _quarantine(daemon)] == ["digest"]


def test_gets_go_on_during_a_pass(daemon: Daemon) -> None:
    """A slow pass delays no get; a second pass is refused; a caller that disconnects ends its pass."""
    names = chain(1, BLOCKS)
    _put(daemon, names)
    with connect(daemon.target) as operator, connected(daemon) as client:
        namespace = _namespace(client)
        told = operator.follow(apb.ScrubRequest(bandwidth=1 << 20))
        assert next(told).finished is False
        with connect(daemon.target) as other, pytest.raises(Overloaded, match="another requested pass is running"):
            next(other.follow(apb.ScrubRequest()))
        client.call(client.admin.Evict, apb.EvictRequest(tier="host.0"))
        begun = time.monotonic()
        assert client.read(namespace, names) == BLOCKS  # from the store that is being scrubbed
        assert time.monotonic() - begun < SOON_S
        told.close()
        await_true(lambda: _can_scrub(daemon), "the end of a pass whose caller has gone")


def _can_scrub(daemon: Daemon) -> bool:
    try:
        return bool(_scrub(daemon))
    except Overloaded:
        return False


def test_the_bandwidth_of_a_pass_is_kept(daemon: Daemon) -> None:
    """Six MiB at two MiB per second take at least the time that the limit implies; the rate is reported."""
    _put(daemon, chain(1, BLOCKS), durable=False)
    _put(daemon, chain(2, BLOCKS // 2), durable=False)
    begun = time.monotonic()
    found = _scrub(daemon, tier="host.0", bandwidth=2 << 20)
    seconds = time.monotonic() - begun
    size = found["host.0"].bytes
    report("scrub.bandwidth", wanted=2 << 20, had=round(size / seconds))
    assert seconds >= (size - (1 << 20)) / (2 << 20) * 0.9
    assert list(found) == ["host.0"]


def test_the_daemon_ends_during_a_pass(daemon: Daemon) -> None:
    """A slow pass does not keep the daemon from stopping, and its caller gets Unavailable."""
    _put(daemon, chain(1, BLOCKS))
    faults: list[BaseException] = []

    def follow() -> None:
        try:
            with connect(daemon.target) as operator:
                for _ in operator.follow(apb.ScrubRequest(bandwidth=512 << 10)):
                    begun.set()
        except Unavailable as error:
            faults.append(error)

    begun = threading.Event()
    caller = threading.Thread(target=follow)
    caller.start()
    assert begun.wait(SOON_S)
    assert daemon.stop() == 0
    caller.join(SOON_S)
    assert len(faults) == 1
