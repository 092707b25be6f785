"""The web page of a real daemon over HTTP: what it shows, what it hides, and its bounds."""

from __future__ import annotations

import json
import random
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.system.warm import Daemon
from tierd.client import Client, NamespaceSpec
from tierd.testing.daemon import SMALL

SOON_S = 20.0
SECRETS = {"model": "secret-model", "name": "secret-session", "salt": "secret-salt"}
TOKENS = 48 * 16


def with_page(config: str = SMALL) -> str:
    return config.replace("[server]", '[server]\nmetrics_listen = "127.0.0.1:0"\npage = true', 1)


def port_of(daemon: Daemon) -> int:
    """The port that the daemon's log tells."""
    return int(re.findall(r"metrics\S*=\S*http://127\.0\.0\.1:(\d+)/metrics", daemon.log)[-1])


class Page:
    """A reader of one daemon's page."""

    def __init__(self, port: int) -> None:
        self.port = port

    def text(self, path: str = "/page.json") -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=SOON_S) as reply:
            return bytes(reply.read())

    def until(self, shows: Any) -> dict[str, Any]:
        """The first answer for which `shows` holds."""
        end = time.monotonic() + SOON_S
        while time.monotonic() < end:
            answer = dict(json.loads(self.text()))
            if shows(answer):
                return answer
            time.sleep(0.2)
        raise AssertionError(f"not shown within {SOON_S} s: {answer}")


def last(answer: dict[str, Any]) -> dict[str, float]:
    """The latest sample by column."""
    return dict(zip(answer["columns"], answer["rows"][-1], strict=True))


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Daemon, Page]]:
    with Daemon(with_page()) as daemon, Client(daemon.target, name=SECRETS["name"]) as client:
        spec = NamespaceSpec(model=SECRETS["model"], salt=SECRETS["salt"], tokens_per_block=16, block_bytes=4096)
        space = client.open_namespace(spec)
        client.put(space, range(TOKENS), [bytes(4096)] * 48)
        client.get(space, range(TOKENS + 160))
        yield daemon, Page(port_of(daemon))


def test_the_page_shows_what_the_daemon_did(served: tuple[Daemon, Page]) -> None:
    """Hits, misses, pages and their map are those of the clients' calls."""
    answer = served[1].until(
        lambda found: found["walk"] and last(found)["missed:absent"] and last(found)["pages:host.0"]
    )
    row = last(answer)
    assert (row["hit:host.0"], row["missed:absent"], row["pages:host.0"]) == (TOKENS, 160, 48)
    assert row["used:host.0"] >= 48 * 4096
    assert sum(answer["walk"]["tiers"]["host.0"]["pages"]) == 48
    assert sum(blocks for _, _, blocks, _ in answer["walk"]["depths"]) == 48
    assert [tier["name"] for tier in answer["tiers"]] == ["host.0", "nvme.0"]
    assert answer["sessions"]["all"] == 1


def test_the_page_names_nobody(served: tuple[Daemon, Page]) -> None:
    """No answer has a tenant, session name, model, salt or directory, nor a session's id or process."""
    daemon, page = served
    text = page.text().decode()
    assert [word for word in (*SECRETS.values(), "uid-", str(daemon.root)) if word in text] == []
    (session,) = json.loads(text)["sessions"]["shown"]
    assert set(session) == {"engine", "state", "age_s", "leases", "reservations", "pinned", "reserved"}


def test_answers_are_shared_for_a_second(served: tuple[Daemon, Page]) -> None:
    """Readers at the same time get one state, made once."""
    answers = [json.loads(served[1].text()) for _ in range(5)]
    assert len({answer["uptime_s"] for answer in answers}) <= 2


def test_a_reader_gets_only_what_is_new(served: tuple[Daemon, Page]) -> None:
    """With its run, sample and walk named, a reader gets no old rows and no old map; after another
    run it gets all."""
    page = served[1]
    first = page.until(lambda found: found["walk"])
    asked = f"/page.json?run={first['run']}&since={first['last']}&walk={first['walk']['number']}"
    again = json.loads(page.text(asked))
    assert len(again["rows"]) == again["last"] - first["last"]
    assert again["walk"] is None or again["walk"]["number"] > first["walk"]["number"]
    other = json.loads(page.text(asked.replace(first["run"], "0" * 16)))
    assert len(other["rows"]) == other["last"]


def test_no_page_unless_asked_for() -> None:
    """Without `server.page` the listener serves metrics alone, as before."""
    with Daemon(with_page().replace("page = true", "")) as daemon:
        page = Page(port_of(daemon))
        assert b"tierd_info" in page.text("/metrics")
        assert b"<html" not in page.text("/")
        assert b"tierd_info" in page.text("/page.json")


def test_any_bytes_get_an_answer_or_an_end(served: tuple[Daemon, Page]) -> None:
    """Random and damaged requests never stop the page: each ends with a status or a closed connection."""
    page, chance = served[1], random.Random(41)
    good = b"GET /page.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for number in range(150):
        raw = bytearray(good)
        for _ in range(chance.randrange(1, 6)):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        if number % 10 == 0:
            raw = bytearray(b"GET /" + b"a" * chance.choice([70_000, 4000]) + b" HTTP/1.1\r\n\r\n")
        if number % 10 == 1:
            raw = bytearray(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 300 + b"\r\n")
        with socket.create_connection(("127.0.0.1", page.port), timeout=SOON_S) as client:
            try:
                client.sendall(raw)
                client.shutdown(socket.SHUT_WR)
                while client.recv(65536):  # hangs until its timeout if nobody ends it
                    pass
            except ConnectionError:
                continue
    assert json.loads(page.text())["state"] == "serving"
    assert "Traceback" not in served[0].log
