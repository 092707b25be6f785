"""Wear of a store under a real daemon: budgets, counts across restarts, drive health and reports."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.depth import report, slow
from tests.system.blocks import await_true
from tests.system.raw import RawClient
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd._proto import cache_pb2 as pb
from tierd.client import Client, NamespaceSpec
from tierd.testing import chain, content_of

KIB, MIB = 1 << 10, 1 << 20
LENGTH = 64 * KIB
DAY_S = 86400
CONFIG = """\
[[host]]
capacity = "16 MiB"
segment = "1 MiB"

[[nvme]]
capacity = "256 MiB"
segment = "4 MiB"
admission = "{admission}"
wear_budget = {daily}
wear_burst = "1 min"
"""


def config(*, admission: str = "all", rate: int = 0) -> str:
    """rate: bytes per second of the budget; 0: none."""
    return CONFIG.format(admission=admission, daily=rate * DAY_S)


def put(client: RawClient, namespace: int, hashes: np.ndarray, *, durable: bool = False) -> int:
    """Writes and commits a chain. Returns the number of blocks that got a page."""
    reservation, handles = client.reserve(namespace, hashes, length=LENGTH)
    for handle, name in zip(handles, hashes, strict=True):
        if handle["status"] == pb.BLOCK_STATUS_RESERVED:
            client.page(handle, writable=True)[:] = content_of(name, LENGTH).tobytes()
    level = pb.DURABILITY_DURABLE if durable else pb.DURABILITY_MEMORY
    if reservation:
        client.call(client.cache.Commit, pb.CommitRequest(reservation=reservation, durability=level))
    return int((handles["status"] == pb.BLOCK_STATUS_RESERVED).sum())


def worn(client: RawClient) -> apb.StoreWear:
    """The wear that the daemon reports for its only store."""
    (store,) = client.call(client.admin.Wear, apb.WearRequest()).stores
    return store


def written(client: RawClient) -> int:
    """Bytes of blocks that transfers have written to the store."""
    tiers = client.call(client.admin.Tiers, apb.TiersRequest()).tiers
    return int(next(tier for tier in tiers if tier.name == "nvme.0").bytes_written)


def test_a_use_makes_a_block_worth_writing() -> None:
    """A block that the store declined is written after a get uses it, without another put."""
    host = 'segment = "1 MiB"\nhigh_watermark = 0.02\nlow_watermark = 0.01'
    text = config(admission="second-touch").replace('segment = "1 MiB"', host, 1)
    with Daemon(text) as daemon, RawClient(daemon.target) as raw, Client(daemon.target) as client:
        space = client.open_namespace(NamespaceSpec(model="m", tokens_per_block=16, block_bytes=LENGTH))
        client.put(space, chain(1, 16), [bytes(LENGTH)] * 16)
        await_true(lambda: sum(worn(raw).declined.values()) > 0, "the store declines what nobody has used")
        assert written(raw) == 0
        assert client.get(space, chain(1, 16)).blocks == 16
        await_true(lambda: written(raw) > 0, "the store takes what was used")


@pytest.mark.parametrize("admission", ["all", *slow("learned")])
def test_no_more_is_written_than_the_budget(admission: str) -> None:
    """Under a load far above the budget, the daemon writes at most rate x time and reports its declines."""
    rate, begun = 8 * LENGTH, time.monotonic()
    with Daemon(config(admission=admission, rate=rate)) as daemon, RawClient(daemon.target) as client:
        space = client.open_namespace(block_bytes=LENGTH, model="m")
        put_bytes = sum(put(client, space, chain(seed, 16)) * LENGTH for seed in range(100))

        def enough() -> bool:
            put(client, space, chain(1000 + int(time.monotonic() * 10) % 10**6, 16))
            return written(client) >= 4 * rate

        # The learned policy saves budget for better blocks, and spends it within the burst's
        # minute.
        await_true(enough, "four seconds' budget is written", within_s=60)
        now = written(client)
        spent_s = time.monotonic() - begun
        store = worn(client)
        report("wear.budget", admission=admission, put=put_bytes, written=now, affordable=round(rate * spent_s))
        assert now <= rate * spent_s < put_bytes
        assert store.has_budget and store.budget_bytes_per_day == rate * DAY_S
        assert store.budget_burst_bytes == rate * 60
        assert store.declined["budget"] > 0
        await_true(lambda: any("admission_declined" in name for name in counters(client)), "the counter follows")


def counters(client: RawClient) -> dict[str, int]:
    """Every counter of the daemon."""
    return dict(client.call(client.admin.Status, apb.StatusRequest()).counters)


def test_what_is_to_be_durable_is_written_whatever_the_budget() -> None:
    """A durable put is written although no budget is left, and makes the budget negative."""
    with Daemon(config(rate=1)) as daemon, RawClient(daemon.target) as client:
        space = client.open_namespace(block_bytes=LENGTH, model="m")
        assert put(client, space, chain(1, 16), durable=True) == 16
        assert written(client) == 16 * LENGTH
        store = worn(client)
        assert store.budget_left_bytes < -15 * LENGTH
        assert store.written_since_start_bytes == 16 * (LENGTH + 4 * KIB)


def test_the_count_outlives_restarts() -> None:
    """Written bytes and budget persist across restarts, after SIGKILL as last saved. A damaged
    count is dropped and reported."""
    with Daemon(config(rate=1)) as daemon:
        with RawClient(daemon.target) as client:
            space = client.open_namespace(block_bytes=LENGTH, model="m")
            put(client, space, chain(1, 16), durable=True)
            first = worn(client)
        assert daemon.stop() == 0
        daemon.start()
        with RawClient(daemon.target) as client:
            second = worn(client)
        assert second.written_bytes == first.written_bytes == 16 * (LENGTH + 4 * KIB)
        assert second.written_since_start_bytes == 0
        assert second.written_today_bytes in (0, first.written_today_bytes)  # 0 after midnight
        assert first.budget_left_bytes <= second.budget_left_bytes < first.budget_left_bytes + 600
        daemon.kill()
        path = daemon.root / "state" / "wear.jsonl"
        kept = path.read_bytes()
        assert b'"written_bytes":1' in kept
        path.write_bytes(kept.replace(b'"written_bytes":1', b'"written_bytes":9'))
        daemon.start()
        with RawClient(daemon.target) as client:
            assert worn(client).written_bytes == 0
        assert "wear count dropped" in daemon.log


def test_people_see_what_a_drive_cannot_tell(tmp_path: Path) -> None:
    """The daemon asks nvme-cli about NVMe drives only; `tierctl wear` prints its errors, plain in a pipe."""
    program = tmp_path / "nvme"
    program.write_text(f'#!/bin/sh\nprintf "%s " "$@" >> {tmp_path}/asked\necho "Permission denied" >&2\nexit 1\n')
    program.chmod(0o700)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    with Daemon(config(rate=100), env={"PATH": path}) as daemon, RawClient(daemon.target) as client:
        drives = worn(client).drives
        command = [sys.executable, "-m", "tierd.cli.ctl", "wear", "--target", daemon.target]
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert "nvme.0" in text and "8.24 MiB" in text and "life unknown: " in text and "\x1b" not in text
    assert drives
    for drive in drives:
        assert drive.trouble and not drive.has_health
        assert drive.trouble in text
        assert (f"smart-log {drive.device} -o json" in asked) == drive.device.startswith("/dev/nvme")
