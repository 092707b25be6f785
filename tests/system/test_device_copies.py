"""GPU pages beyond single blocks, with a real daemon and client: contiguous rows and kernel copies."""

from __future__ import annotations

import gc
import re
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.system.device_driver import fake_only, read_at, use_driver, use_fatbins
from tests.system.elsewhere import Elsewhere, Talk
from tests.system.sdk import await_nothing_held, held
from tests.system.warm import Daemon
from tierd.cli import ctl
from tierd.client import Client, NamespaceSpec, PutGroup
from tierd.client.session.ranges import contiguous
from tierd.errors import InvalidArgument, ViewsAlive
from tierd.testing import chain, content_of, is_content

TOKENS, BLOCK_BYTES, BLOCKS = 16, 2 << 20, 5
SPEC = NamespaceSpec(model="row", tokens_per_block=TOKENS, block_bytes=BLOCK_BYTES)
HOST = '[[host]]\ncapacity = "32 MiB"\nsegment = "4 MiB"\n'


def config(segment: str) -> str:
    """A configuration with a device tier of this segment size."""
    return f'[[device]]\nkind = "cuda"\ncapacity = "24 MiB"\nsegment = "{segment}"\n' + HOST


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later child processes use the driver."""
    use_driver(monkeypatch)


def stored(client: Client, seed: int) -> Any:
    """A lease on blocks of which the last covers half of its tokens."""
    space, names = client.open_namespace(SPEC), chain(seed, BLOCKS)
    pages = client.reserve(PutGroup(space, names, tokens=BLOCKS * TOKENS - TOKENS // 2), tier="device")
    for name, page in zip(names, list[Any](pages.buffers()), strict=True):
        page.copy_from(content_of(name, page.nbytes))
    pages.commit()
    return client.acquire(space, names, tokens=BLOCKS * TOKENS - TOKENS // 2, tier="device")


def in_a_row(talk: Talk, target: str) -> None:
    """Runs in the worker: reads the row at its one address, and releases with the row and without it."""
    client = Client(target)
    lease = stored(client, 1)
    row = contiguous(lease.views())
    data = read_at(row)
    cuts = np.split(data, range(BLOCK_BYTES, len(data), BLOCK_BYTES))
    right = [is_content(cut, name) for cut, name in zip(cuts, chain(1, BLOCKS), strict=True)]
    try:
        lease.release()
        said = ""
    except ViewsAlive as error:
        said = type(error).__name__
    talk.say([right, [len(cut) for cut in cuts], said])
    talk.hear()
    del row
    gc.collect()
    lease.release()
    talk.say("released")
    talk.hear()


def test_leased_pages_stand_in_a_row(driver: None) -> None:
    """Leased pages form one contiguous row, with a short last block, and the row keeps its lease alive."""
    with Daemon(config("2 MiB")) as daemon, Elsewhere(in_a_row, daemon.target) as worker:
        assert worker.hear() == [[True] * BLOCKS, [BLOCK_BYTES] * (BLOCKS - 1) + [BLOCK_BYTES // 2], "ViewsAlive"]
        assert held(daemon)[0] == 1
        assert worker.ask() == "released"
        await_nothing_held(daemon, "a row that has gone")


def refused(talk: Talk, target: str) -> None:
    """Runs in the worker: says the error of `contiguous`."""
    lease = stored(Client(target), 2)
    try:
        contiguous(lease.views())
        talk.say("")
    except InvalidArgument as error:
        talk.say(str(error))
    talk.hear()


def test_segments_of_several_blocks_are_no_row(driver: None) -> None:
    """The error for larger segments names the block's bytes, the GPU's granularity and the setting."""
    with Daemon(config("4 MiB")) as daemon, Elsewhere(refused, daemon.target) as worker:
        said = worker.hear()
    assert f"{BLOCK_BYTES} bytes" in said and f"granularity is {2 << 20}" in said
    assert f"set the device tier's segment to {BLOCK_BYTES} bytes" in said


@fake_only("how long a copy takes, and what cuFile answers, are chosen")
@pytest.mark.parametrize(
    ("piece_us", "way", "said"),
    [
        (
            "2000",
            "",
            "pages up to 64 KiB to it and 64 KiB from it copied by a kernel, nvme.0 by way of host memory",
        ),
        ("0", "nvfs", "pages copied by its copy engines, nvme.0 read directly by nvidia-fs"),
    ],
)
def test_by_which_ways_pages_come_is_shown(monkeypatch: pytest.MonkeyPatch, piece_us: str, way: str, said: str) -> None:
    """`tierctl tiers` shows the engine of small copies and the read path from a store, as probed at
    the start."""
    monkeypatch.setenv("TIERD_FAKE_CUFILE", way)
    use_fatbins(monkeypatch)
    monkeypatch.setenv("TIERD_FAKE_CUDA_PIECE_US", piece_us)
    with Daemon(config("4 MiB")) as daemon:
        shown = CliRunner().invoke(ctl.cli, ["tiers", "--target", daemon.target], prog_name="tierctl").stdout
        assert re.search(rf"device\.0\s+Fake GPU \w+, {re.escape(said)} \(vmm\)", shown), shown
