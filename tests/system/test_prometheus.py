"""A real Prometheus scrapes a real daemon, and evaluates its alerts and the dashboard's panels."""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.repo.test_monitoring import MONITORING, panels, rules
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as pb
from tierd.cli.admin import connect
from tierd.client import Client, NamespaceSpec
from tierd.testing.daemon import SMALL

LONGEST_S = 60.0
BLOCK = 256 << 10


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Prometheus:
    """A server with the repository's rules that scrapes one address each second.

    target: of the daemon there."""

    def __init__(self, folder: Path, address: str, target: str) -> None:
        self.target = target
        config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"][0]["static_configs"] = [{"targets": [address]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        shutil.copy(MONITORING / "alerts.yml", folder)
        self.port = free_port()
        words = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        words.append("--enable-feature=exemplar-storage")
        command = ["prometheus", *words, f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=error"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(self, path: str, **query: str) -> Any:
        """The data of an answer of its API. Raises OSError while it does not listen."""
        words = urllib.parse.urlencode(query)
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}?{words}", timeout=10) as answer:
            return json.load(answer)["data"]

    def awaited(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an expression, once there are any."""
        end = time.monotonic() + LONGEST_S
        while time.monotonic() < end:
            try:
                if found := self.ask("query", query=expression)["result"]:
                    return list(found)
            except OSError:
                pass
            time.sleep(0.2)
        raise AssertionError(f"no sample of {expression} within {LONGEST_S} s")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if not shutil.which("prometheus"):
        pytest.skip("prometheus is not installed (Debian: prometheus)")
    port = free_port()
    config = SMALL.replace("[server]", f'[server]\nmetrics_listen = "127.0.0.1:{port}"', 1)
    with Daemon(config) as daemon, Client(daemon.target) as client:
        space = client.open_namespace(NamespaceSpec(model="scraped", tokens_per_block=16, block_bytes=4096))
        client.put(space, range(64), [bytes(4096)] * 4)
        client.get(space, range(80))
        client.put(space, range(64), [bytes(4096)] * 4, durable=True)
        with connect(daemon.target) as operator:
            operator.ask(pb.EvictRequest(tier="host.0"))
        assert client.get(space, range(64)).tokens == 64  # from NVMe, with a transfer
        running = Prometheus(tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{port}", daemon.target)
        try:
            running.awaited("count_over_time(tierd_info[1m]) >= 3")
            yield running
        finally:
            running.process.terminate()
            running.process.wait(timeout=LONGEST_S)


def test_the_daemon_is_scraped(server: Prometheus) -> None:
    """The target is up, and hits and misses of the client arrive."""
    assert [sample["value"][1] for sample in server.ask("query", query='up{job="tierd"}')["result"]] == ["1"]
    assert float(server.awaited("sum(tierd_tokens_missed_total)")[0]["value"][1]) >= 16


def test_exemplars_name_calls(server: Prometheus) -> None:
    """Prometheus keeps exemplars of transfers, each with the id of the call that waited for it."""
    now = time.time()
    span = {"start": str(now - 600), "end": str(now + 600)}
    series = server.ask("query_exemplars", query='tierd_transfer_seconds_bucket{link="nvme.0>host.0"}', **span)
    assert series and all(exemplar["labels"]["call"] for one in series for exemplar in one["exemplars"])


def test_alerts_are_evaluated_and_quiet(server: Prometheus) -> None:
    """Every rule is evaluated without an error. None of a serious kind fires for a sound daemon."""
    groups = server.ask("rules")["groups"]
    found = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert found.keys() == {rule["alert"] for rule in rules()}
    assert {name: rule["lastError"] for name, rule in found.items() if rule.get("lastError")} == {}
    serious = [r for r in found.values() if r["labels"]["severity"] != "info" and r["state"] != "inactive"]
    assert serious == []


def test_every_panel_shows_data(server: Prometheus) -> None:
    """Each expression of each panel has samples once blocks went to the store and back, by a prefetch too,
    and some were not written there. Only corrupt pages have none."""
    texts = [target["expr"] for panel in panels() for target in panel["targets"]]  # type: ignore[attr-defined]
    empty = {text for text in texts if "tierd_corrupt_total" not in text}
    end = time.monotonic() + LONGEST_S
    with Client(server.target, timeout_s=LONGEST_S) as client:
        space = client.open_namespace(NamespaceSpec(model="panels", tokens_per_block=16, block_bytes=BLOCK))
        for turn in itertools.count():
            prompt = [turn % 6 * 1000 + token for token in range(648)]  # six have 60 MiB; host memory has 32
            client.prefetch(space, space.hash(prompt))
            client.get(space, prompt)
            client.put(space, prompt, [bytes(BLOCK)] * 40 + [bytes(BLOCK // 2)])
            for text in sorted(empty):
                asked = text.replace("$__rate_interval", "1m").replace("$instance", ".*")
                if server.ask("query", query=asked)["result"]:
                    empty.discard(text)
            if not empty:
                break
            assert time.monotonic() < end, empty
