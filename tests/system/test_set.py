"""Settings of a running daemon: `tierctl set` and SIGHUP, all or nothing, audited, until a restart."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from tests.system import test_encoded_stores as encoded
from tests.system.blocks import await_true
from tests.system.inside import inside
from tests.system.raw import RawClient
from tests.system.sdk import SMALL, put, right
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as apb
from tierd.cli import ctl
from tierd.client import Client
from tierd.core.formats.model import TierKind
from tierd.mover import Link
from tierd.testing import chain
from tierd.tiers.store.nvme import NvmeStore

CONFIG = """\
[server]
session_limit = 8

[[host]]
capacity = "4 MiB"
segment = "1 MiB"

[[nvme]]
capacity = "32 MiB"
segment = "4 MiB"
"""
CHAINS = 24
CHANGES = (
    {"host.0.eviction": "lru", "nvme.0.eviction": "arc", "nvme.0.admission": "all", "mover.batch_blocks": "4"},
    {"host.0.eviction": "priority", "host.0.high_watermark": "0.5", "host.0.low_watermark": "0.3"},
    {"host.0.eviction": "reuse-index", "nvme.0.eviction": "reuse-index", "nvme.0.wear_budget": "100 GiB"},
    {"host.0.headroom": "0.2", "server.session_share": "0.4", "mover.transfer_limit": "8", "scrub.period": "0"},
    {"host.0.eviction": "lfu", "nvme.0.admission": "second-touch", "scrub.period": "1 h", "nvme.0.hang_limit": "9 s"},
)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """Host memory above a store."""
    with Daemon(CONFIG) as running:
        yield running


def request(settings: dict[str, str], *, check: bool = False) -> apb.SetRequest:
    """A change of these settings."""
    return apb.SetRequest(settings=[apb.SettingValue(name=k, value=v) for k, v in settings.items()], check=check)


def change(operator: RawClient, settings: dict[str, str], *, check: bool = False) -> dict[str, tuple[str, str]]:
    """Before and after of each setting that differs."""
    answer = operator.call(operator.admin.Set, request(settings, check=check))
    return {row.name: (row.before, row.after) for row in answer.changes}


def values(daemon: Daemon) -> dict[str, str]:
    with RawClient(daemon.target) as operator:
        answer = operator.call(operator.admin.Set, apb.SetRequest())
    return {row.name: row.value for row in answer.settings}


def hang_up(daemon: Daemon, config: str, said: str) -> None:
    """Writes the file anew, sends SIGHUP and waits for the log line."""
    path, count = daemon.root / "tierd.toml", daemon.log.count(said)
    path.write_text(daemon._with_arena(config))
    os.kill(daemon.pid, signal.SIGHUP)
    await_true(lambda: daemon.log.count(said) > count, said)


def test_changes_hold_until_a_restart(daemon: Daemon) -> None:
    """Settings change together and are listed; the log has who changed them; a restart ends it."""
    with RawClient(daemon.target) as operator:
        changed = change(operator, {"server.log_level": "error", "host.0.high_watermark": "0.9"})
    assert changed == {"server.log_level": ('"info"', '"error"'), "host.0.high_watermark": ("0.8", "0.9")}
    opened = daemon.log.count("session open")
    assert (values(daemon)["server.log_level"], values(daemon)["host.0.high_watermark"]) == ('"error"', "0.9")
    line = next(line for line in daemon.log.splitlines() if "setting changed" in line and "high_watermark" in line)
    assert all(f"{key}={value}" in line for key, value in (("pid", os.getpid()), ("uid", os.getuid()), ("after", 0.9)))
    assert daemon.log.count("session open") == opened == 1
    daemon.restart()
    assert values(daemon)["host.0.high_watermark"] == "0.8"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"nvme.0.eviction": "bset"}, "InvalidArgument"),
        ({"nvme.0.codec": "no-such-codec"}, "InvalidArgument"),
        ({"host.0.low_watermark": "0.9"}, "InvalidArgument"),
        ({"host.0.segment": "2 MiB"}, "InvalidArgument"),
        ({"server.session_limit": "33"}, "InvalidArgument"),
        ({"server.log_level": "shout"}, "InvalidArgument"),
    ],
)
def test_one_wrong_setting_changes_none(daemon: Daemon, wrong: dict[str, str], said: str) -> None:
    """A setting that is refused leaves the right ones beside it as they were; so does a check."""
    before, right_one = values(daemon), {"server.call_timeout": "5 s"}
    with RawClient(daemon.target) as operator:
        assert operator.error_of(operator.admin.Set, request(right_one | wrong)) == said
        assert change(operator, right_one, check=True) == {"server.call_timeout": ("30.0", "5.0")}
    assert values(daemon) == before and "setting changed" not in daemon.log


def test_sessions_are_limited_at_once(daemon: Daemon) -> None:
    """A lower session limit refuses the next session; a higher one lets it in."""
    with RawClient(daemon.target) as operator:
        change(operator, {"server.session_limit": "1"})
        assert "session_limit" in _refused(daemon)
        change(operator, {"server.session_limit": "2"})
        with RawClient(daemon.target):
            assert "session_limit" in _refused(daemon)


def _refused(daemon: Daemon) -> str:
    with pytest.raises(Exception, match="sessions") as error, RawClient(daemon.target):
        pass
    return str(error.value)


def test_hang_up_reads_the_file_again(daemon: Daemon) -> None:
    """SIGHUP takes over live settings of the file and names others; a bad file changes nothing."""
    better = CONFIG.replace("session_limit = 8", 'session_limit = 9\nclock = "replay"')
    hang_up(daemon, better.replace("32 MiB", "64 MiB").replace("4 MiB", "6 MiB", 1), "configuration read again")
    assert (values(daemon)["server.session_limit"], values(daemon)["host.0.capacity"]) == ("9", '"6 MiB"')
    line = next(line for line in daemon.log.splitlines() if "configuration read again" in line)
    assert "['server.clock', 'nvme.0.capacity']" in line and "changed=2" in line
    before = values(daemon)
    for bad in ("[server]\nsession_limit = 0\n", "session_limit", "[server]\nsession_limit = 9000\n"):
        hang_up(daemon, bad, "nothing changed")
    assert values(daemon) == before
    with Client(daemon.target) as client:
        assert put(client, client.open_namespace(SMALL), 1, 4)


def test_policies_and_limits_change_under_load(daemon: Daemon) -> None:
    """While clients put and get, every change succeeds, and no get returns a wrong byte."""
    done, wrong, served = threading.Event(), list[str](), [0, 0]

    def work(number: int) -> None:
        try:
            with Client(daemon.target, best_effort=True) as client:
                space = client.open_namespace(SMALL)
                while not done.is_set():
                    for seed in range(number * CHAINS, (number + 1) * CHAINS):
                        put(client, space, seed, 16)
                        views = client.get(space, chain(seed - 3, 16)).views
                        served[number] += len(views)
                        if right(views, seed - 3) != len(views):
                            wrong.append(f"chain {seed - 3}")
        except Exception as error:
            wrong.append(repr(error))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    try:
        with RawClient(daemon.target) as operator:
            for settings in CHANGES * 2:
                before = list(served)
                change(operator, settings)
                await_true(lambda before=before: served[0] > before[0] and served[1] > before[1], "gets go on")  # type: ignore[misc]
    finally:
        done.set()
        for worker in workers:
            worker.join()
    assert not wrong
    assert "Traceback" not in daemon.log


def test_a_codec_changes_while_blocks_are_stored() -> None:
    """Blocks stored before, during and after changes of the codec come back exact."""
    config = encoded.CONFIG.format(codec="").replace("16 MiB", "48 MiB")
    with Daemon(config) as daemon, Client(daemon.target) as client, RawClient(daemon.target) as operator:
        space, done, stored = client.open_namespace(encoded.SPEC), threading.Event(), list[int]()

        def store() -> None:
            while not done.is_set() and len(stored) < 300:
                seed = len(stored)
                encoded.stored(client, space, encoded.blocks(seed, 3), chain(seed, 3))
                stored.append(seed)

        worker = threading.Thread(target=store)
        worker.start()
        for codec in ("lossless", "", "rot-8-4", "lossless", "int8", ""):
            seen = len(stored)
            change(operator, {"nvme.0.codec": codec})
            await_true(lambda seen=seen: len(stored) > seen + 2 or not worker.is_alive(), "puts go on")  # type: ignore[misc]
        done.set()
        worker.join()
        encoded.evict(daemon)
        for seed in stored:
            assert encoded.off(encoded.got(client, space, chain(seed, 3)), encoded.blocks(seed, 3)) == [0.0] * 3
        assert len(stored) > 12 and "Traceback" not in daemon.log
        counts = operator.call(operator.admin.Namespaces, apb.NamespacesRequest()).namespaces[0].encoding
    assert 0 < counts.blocks < 3 * len(stored)


async def test_every_part_has_the_new_values() -> None:
    """Limits that parts keep for themselves are changed there too."""
    async with inside() as daemon:
        cache, (_, store) = daemon.daemon.cache, daemon.daemon.tiers
        cache.parts.mover._links[1, 0] = Link(1)
        texts = {"mover.transfer_limit": "8", "mover.batch_blocks": "4", "scrub.period": "1 h"}
        more = {"nvme.0.hang_limit": "9 s", "nvme.0.fault_limit": "3", "server.session_share": "0.25"}
        await daemon.listeners.live.set(texts | more, is_check=False, who={})
        mover, breaker = cache.parts.mover, cache.health.breakers[store.position]
        assert (mover._link_limit, {link.limit for link in mover._links.values()}) == (2, {2})
        assert (daemon.daemon.scrub.period_s, breaker._tolerance.faults) == (3600.0, 3)
        assert isinstance(store, NvmeStore) and store.patience.hang_s == 9.0
        assert cache.core.share_bytes(TierKind.HOST) == 2 << 20


def test_the_verb_shows_what_it_did(daemon: Daemon) -> None:
    """The verb lists settings, shows changes, checks without changing, and names what is wrong."""

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(ctl.cli, ["set", *arguments, "--target", daemon.target], prog_name="tierctl")
        return result.exit_code, " ".join(result.output.split())

    assert "server.queue_limit 256 256 calls, 1 to 65536" in run()[1]
    code, shown = run("--check", "server.log_level=warning")
    assert code == 0 and "Checked; nothing changed." in shown and values(daemon)["server.log_level"] == '"info"'
    code, shown = run("server.log_level=warning", "server.call_timeout=5 s")
    assert code == 0 and 'server.log_level "info" "warning"' in shown and "Until a restart" in shown
    assert run("server.queue_limit")[0] == run("--check")[0] == 2
    code, shown = run("server.queue_limit=0")
    assert code != 0 and "server.queue_limit: 0" in shown
