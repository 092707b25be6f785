"""The synchronous client's promises over TCP, without shared memory."""

from __future__ import annotations

import contextlib
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.unit.client.conftest import BEARER, CLASS_BYTES, SPEC, TOKENS
from tierd.client import AsyncClient, Client, Group, NamespaceSpec, Need
from tierd.client.connect.link import Link
from tierd.errors import (
    ConfigError,
    InvalidArgument,
    Overloaded,
    Unavailable,
    Unsupported,
)

UNSENDABLE = [b"\xff\xfe" * 20, "p\xe4ssword-of-some-length".encode(), b"two lines\nof some length\n", bytes(20)]


def remote(daemon, tmp_path, *, asking="", **options):
    path = tmp_path / "bearer"
    path.write_text(BEARER + "\n")
    return Client(f"127.0.0.1:{daemon.port}{asking}", credential_file=str(path), **options)


def test_remote_put(daemon, tmp_path):
    """Over TCP blocks travel as checksummed chunks, also blocks larger than a chunk."""
    spec = NamespaceSpec(model="big", tokens_per_block=16, block_bytes=3 << 20)
    with remote(daemon, tmp_path) as client:
        result = client.put(client.open_namespace(spec), TOKENS, [bytes(3 << 20), bytes(3 << 20), bytes(3 << 19)])
    assert result.stored == 3


@pytest.mark.parametrize("form", ["views", "one", "list"])
def test_remote_get_ends_at_a_wrong_byte(daemon, tmp_path, form):
    """Blocks arrive whole and in order; the first wrong checksum ends the prefix."""
    out = {"views": None, "one": bytearray(8 * CLASS_BYTES), "list": [bytearray(CLASS_BYTES) for _ in range(8)]}[form]
    with remote(daemon, tmp_path) as client:
        ns = client.open_namespace(SPEC)
        got = client.get(ns, list(range(16 * 6)), out=out)
    assert (got.tokens, got.blocks) == (48, 3)
    parts = (
        got.views
        if form == "views"
        else out
        if form == "list"
        else [out[i * CLASS_BYTES :][:CLASS_BYTES] for i in range(3)]
    )
    assert [bytes(part) for part in parts[:3]] == [bytes([i + 1]) * CLASS_BYTES for i in range(3)]


def test_what_the_caller_cannot_take_ends_the_call(daemon, tmp_path):
    """A get with a short `out` is refused after its call at the daemon has ended."""
    with remote(daemon, tmp_path) as client:
        ns = client.open_namespace(SPEC)
        with pytest.raises(InvalidArgument) as kept:
            client.get(ns, list(range(16 * 4096)), out=bytearray(CLASS_BYTES))
        daemon.until(lambda: daemon.calls["Get ended"] == 1)
        assert daemon.calls["Get whole"] == 0
    assert kept.value


@pytest.mark.parametrize("method", ["Put", "Get"])
def test_refused_stream_is_made_again(daemon, tmp_path, method):
    """A TCP put or get that is refused with a hint is retried whole, and succeeds."""

    def note():
        if daemon.calls[method] == 3:
            daemon.faults.clear()

    daemon.faults[method] = Overloaded("thing: full; later", retry_after_s=0.01)
    daemon.before[method] = note
    with remote(daemon, tmp_path) as client:
        ns = client.open_namespace(SPEC)
        assert client.put(ns, TOKENS, [bytes(CLASS_BYTES), b"x" * CLASS_BYTES, b"y" * (CLASS_BYTES // 2)]).stored == 3
        got = client.get(ns, list(range(16 * 6)), out=(out := bytearray(8 * CLASS_BYTES)))
        assert (got.blocks, out[2 * CLASS_BYTES]) == (3, 3)
    assert daemon.calls[method] == 3


def test_remote_has_no_handles(daemon, tmp_path):
    """Verbs that need shared memory are refused with the remedy."""
    with remote(daemon, tmp_path) as client, pytest.raises(Unsupported, match="put and get"):
        ns = client.open_namespace(SPEC)
        client.acquire(ns, ns.hash(TOKENS))


def test_remote_get_is_of_a_prefix(daemon, tmp_path):
    """Over TCP a group that needs only its last tokens is Unsupported by name, or a best-effort miss."""
    with remote(daemon, tmp_path) as client, remote(daemon, tmp_path, best_effort=True) as careless:
        ns, other = client.open_namespace(SPEC), careless.open_namespace(SPEC)
        wanted = [Group(space, space.hash(TOKENS), need=Need.LAST_TOKENS, need_tokens=16) for space in (ns, other)]
        with pytest.raises(Unsupported, match="LAST_TOKENS"):
            client.get(ns, wanted[0])
        assert careless.get(other, wanted[1]).tokens == 0
        assert daemon.calls["Get"] == 0


def test_codec_of_a_daemon_that_knows_none(daemon, tmp_path):
    """A client with a codec works without it if the daemon knows no codecs."""
    with remote(daemon, tmp_path, asking="?codec=lz4") as client:
        ns = client.open_namespace(SPEC)
        assert client.put(ns, TOKENS, [bytes(CLASS_BYTES), b"x" * CLASS_BYTES, b"y" * (CLASS_BYTES // 2)]).stored == 3
        assert client.get(ns, list(range(16 * 6))).blocks == 3


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    ("options", "fault"),
    [("codec=zip", "'zip' is unknown to this process; use 'lz4'"), ("kodec=lz4", "'kodec' is no option")],
)
def test_wrong_codec(kind, options, fault):
    """An unknown codec or option is refused when the client is made."""
    with pytest.raises(InvalidArgument, match=fault):
        kind(f"127.0.0.1:1?{options}")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_codec_without_its_package(monkeypatch, kind):
    """A client whose codec lacks its package is refused with the remedy; without a codec none is needed."""
    monkeypatch.setitem(sys.modules, "lz4", None)
    with pytest.raises(Unsupported, match=r"pip install 'tierd\[lz4\]'"):
        kind("127.0.0.1:1?codec=lz4")
    kind("127.0.0.1:1")


@pytest.mark.parametrize("secret", UNSENDABLE)
def test_credential_that_no_call_can_carry(daemon, tmp_path, secret):
    """A TCP credential that is not one ASCII line is refused before any call, or a best-effort miss."""
    path = tmp_path / "secret"
    path.write_bytes(secret)
    place = {"target": f"127.0.0.1:{daemon.port}", "credential_file": str(path)}
    with Client(**place) as client, pytest.raises(ConfigError, match="^credential_file: .*secret"):
        client.open_namespace(SPEC)
    with Client(**place, best_effort=True) as careless:
        assert not careless.get(careless.open_namespace(SPEC), TOKENS)
    assert not daemon.calls["OpenNamespace"]


def test_no_remote_daemon(daemon, tmp_path):
    """A port without a listener is Unavailable at once."""
    daemon.stop()
    with pytest.raises(Unavailable, match="tcp_listen"), remote(daemon, tmp_path) as client:
        client.open_namespace(SPEC)


def test_one_transport_for_first_calls_at_once() -> None:
    """Threads that make a link's first calls at once share one transport, however slowly it loads."""
    both, made = threading.Barrier(2), list[object]()

    def open_transport(_link: Link) -> Any:
        made.append(object())
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # for the other thread, which must not arrive
        return made[-1]

    link = Link(1, None, metadata=(), open_transport=open_transport)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: link.transport, range(2))
    assert first is second
    assert len(made) == 1
