"""The SDK against the real daemon: forks, kills and restarts, as a worker sees them."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from tests.still import stand_still
from tests.system.sdk import await_nothing_held
from tests.system.warm import Daemon
from tierd.client import AsyncClient, BlockStatus, Client, Group, NamespaceSpec, Need, PutGroup
from tierd.client.blocks import copying, one_sided_get
from tierd.client.session.session import Session
from tierd.errors import NotPermitted, StaleHandle
from tierd.testing import chain
from tierd.testing.daemon import SMALL

BLOCK_BYTES = 64 << 10
SPEC = NamespaceSpec(model="system", tokens_per_block=16, block_bytes=BLOCK_BYTES)
TOKENS = list(range(40))

PRELUDE = """
import gc, os, signal, sys, threading
import numpy as np
from tierd.client import AsyncClient, Client, NamespaceSpec, PutGroup
from tierd.errors import ForkedClient, StaleHandle
TARGET = sys.argv[1]
TOKENS = list(range(40))
SPEC = NamespaceSpec(model="system", tokens_per_block=16, block_bytes=65536)

def in_child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print("child:", repr(error), flush=True)
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""


@pytest.fixture(scope="module")
def daemon():
    with Daemon() as daemon:
        yield daemon


@pytest.fixture
def own_daemon():
    with Daemon() as daemon:
        yield daemon


def block(seed):
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def blocks_of(seed, count=3):
    return [block(seed * 100 + i) for i in range(count)]


def put(client, *, model, seed=0):
    spec = NamespaceSpec(model=model, tokens_per_block=16, block_bytes=BLOCK_BYTES)
    ns = client.open_namespace(spec)
    assert client.put(ns, TOKENS, blocks_of(seed)).stored == 3
    return ns


def run_program(target, body, *args):
    program = PRELUDE + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", program, target, *args], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_another_process_reads_what_was_put(daemon):
    """Another process of the same tenant reads put blocks in place."""
    with Client(daemon.target) as client:
        put(client, model="system")
    out = run_program(
        daemon.target,
        """
        with Client(TARGET) as client:
            got = client.get(client.open_namespace(SPEC), TOKENS)
            print(got.tokens, *(int(view.astype(np.uint64).sum()) for view in got.views))
            try:
                got.views[0].flags.writeable = True
            except ValueError:
                print("read-only")
        """,
    )
    assert out.split() == ["40", *(str(int(b.astype(np.uint64).sum())) for b in blocks_of(0)), "read-only"]


def test_groups_and_ranks(daemon):
    """A hybrid model's groups and ranks are reserved, committed and acquired together, at one token count."""
    spec = {"tokens_per_block": 16, "block_bytes": BLOCK_BYTES, "rank_count": 2, "model": "hybrid"}
    with Client(daemon.target) as client:
        full, window = (client.open_namespace(NamespaceSpec(group=group, **spec)) for group in ("full", "window"))
        tokens = list(range(64))
        parts = [PutGroup(ns, ns.hash(tokens), rank=rank) for ns in (full, window) for rank in (0, 1)]
        with client.reserve(parts) as reservation:
            for i, page in enumerate(reservation.buffers()):
                page[:] = i
            assert set(reservation.commit().statuses) == {BlockStatus.READY}
        groups = [
            Group(full, full.hash(tokens), ranks=(0, 1)),
            Group(window, window.hash(tokens), ranks=(0, 1), need=Need.LAST_TOKENS, need_tokens=20),
        ]
        assert client.lookup(groups).tokens == 64
        with client.acquire(groups) as lease:
            assert (lease.tokens, [g.handles.shape for g in lease.groups], lease.groups[1].first) == (
                64,
                [(2, 4), (2, 2)],
                2,
            )
            out = [bytearray(BLOCK_BYTES) for _ in range(12)]
            assert lease.copy_into(out) == 4
            assert [buffer[0] for buffer in out] == [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 14, 15]


def test_durable(own_daemon):
    """A durable put survives the loss of the process and its memory."""
    with Client(own_daemon.target) as client:
        spec = NamespaceSpec(model="durable", tokens_per_block=16, block_bytes=BLOCK_BYTES)
        ns = client.open_namespace(spec)
        assert client.put(ns, TOKENS, blocks_of(5), durable=True).stored == 3
        own_daemon.restart()
        got = client.get(ns, TOKENS)
        assert [np.array_equal(a, b) for a, b in zip(got.views, blocks_of(5), strict=True)] == [True] * 3
        del got


def test_a_kill_is_survived(own_daemon):
    """After the daemon is killed and restarts, views stay right, old handles are stale, and calls hit."""
    with Client(own_daemon.target) as client:
        ns = put(client, model="killed", seed=3)
        lease = client.acquire(ns, ns.hash(TOKENS))
        views = lease.views()
        pages = client.reserve(PutGroup.private(ns, 1))
        own_daemon.restart()
        got = client.get(ns, TOKENS)
        assert (got.tokens, len(got.views)) == (40, 3)
        for call in (lease.views, pages.commit):
            with pytest.raises(StaleHandle):
                call()
        for view, expected in zip([*views, *got.views], [*blocks_of(3)[:2], *blocks_of(3)], strict=True):
            assert np.array_equal(view, expected)
        del views, view, got
        gc.collect()
        client.lookup(ns, ns.hash(TOKENS))
        assert not client._connector.forgettable


@pytest.mark.parametrize("durable", [False, True])
def test_a_put_in_the_midst_of_which_its_daemon_goes(own_daemon, monkeypatch, durable):
    """If the daemon restarts while a put copies, the client retries the put and all blocks are stored."""
    sum_and_copy, restarts = copying.sum_and_copy, []

    def copy(*what, **how):
        sums = sum_and_copy(*what, **how)
        if not restarts:
            restarts.append(own_daemon.restart())
        return sums

    monkeypatch.setattr(copying, "sum_and_copy", copy)
    with Client(own_daemon.target) as client:
        ns = client.open_namespace(NamespaceSpec(model="midst", tokens_per_block=16, block_bytes=BLOCK_BYTES))
        assert client.put(ns, TOKENS, blocks_of(3), durable=durable).stored == 3
        got = client.get(ns, TOKENS)
        assert [np.array_equal(a, b) for a, b in zip(got.views, blocks_of(3), strict=True)] == [True] * 3
        del got
    assert len(restarts) == 1


@pytest.mark.parametrize("is_spare", [False, True])
def test_a_put_whose_daemon_goes_before_its_pages_are_mapped(own_daemon, monkeypatch, is_spare):
    """If the daemon restarts after Reserve, or a spare of it, but before the mapping, the put is retried."""
    with Client(own_daemon.target) as client:
        ns = client.open_namespace(NamespaceSpec(model="unmapped", tokens_per_block=16, block_bytes=1 << 20))
        blocks = [np.full(1 << 20, i, np.uint8) for i in range(2)]
        for seed in range(4 if is_spare else 0):
            assert client.put(ns, chain(seed, 2), blocks).stored == 2
        if is_spare:
            client._connector.link.session.unmap()
        map_, restarts = Session.map, []

        def late(session, handles, *, timeout_s):
            if not restarts:
                restarts.append(own_daemon.restart())
            return map_(session, handles, timeout_s=timeout_s)

        monkeypatch.setattr(Session, "map", late)
        assert client.put(ns, chain(9, 2), blocks).stored == 2
        assert [int(view[0]) for view in client.get(ns, chain(9, 2)).views] == [0, 1]
        assert len(restarts) == 1


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_get_whose_daemon_goes_before_its_pages_are_mapped(own_daemon, monkeypatch, is_copied):
    """If the daemon restarts between Acquire and the mapping, the get is retried and hits."""
    with Client(own_daemon.target) as client:
        ns = client.open_namespace(NamespaceSpec(model="unmapped", tokens_per_block=16, block_bytes=1 << 20))
        assert client.put(ns, chain(9, 2), [np.full(1 << 20, i, np.uint8) for i in range(2)]).stored == 2
        client._connector.link.session.unmap()
        map_, restarts, out = Session.map, [], np.full((2, 1 << 20), 0xFF, np.uint8)

        def late(session, handles, *, timeout_s):
            if not restarts:
                restarts.append(own_daemon.restart())
            return map_(session, handles, timeout_s=timeout_s)

        monkeypatch.setattr(Session, "map", late)
        monkeypatch.setattr(one_sided_get, "get", lambda *_, **__: None)
        got = client.get(ns, chain(9, 2), out=out if is_copied else None)
        assert (got.blocks, len(restarts)) == (2, 1)
        assert [int(block[0]) for block in (out if is_copied else got.views)] == [0, 1]


def test_a_farewell_to_a_daemon_that_dies(own_daemon):
    """Releases that a dying daemon received but ignored take effect at the next daemon."""
    with Client(own_daemon.target) as client:
        ns = put(client, model="farewell", seed=3)
        views = client.get(ns, TOKENS).views
        stand_still(own_daemon.pid)
        del views
        client._connector.lose(client._connector.link)
        own_daemon.restart()
        assert client.lookup(ns, ns.hash(TOKENS))
        await_nothing_held(own_daemon, "a farewell that nobody heeded")


@pytest.mark.parametrize("way", ["dead", "dying"])
def test_a_client_that_is_closed_without_its_daemon(own_daemon, way):
    """Pages of a client closed without a live daemon are freed when its process connects again."""
    client = Client(own_daemon.target)
    ns = put(client, model="closed", seed=3)
    views, pages = client.get(ns, TOKENS).views, client.reserve(PutGroup.private(ns, 1))
    assert (len(views), len(pages)) == (3, 1)
    if way == "dead":
        own_daemon.kill()
    else:
        stand_still(own_daemon.pid)
    del views, pages
    client.close()
    own_daemon.restart()
    with Client(own_daemon.target) as other:
        assert other.lookup(ns, ns.hash(TOKENS))
        await_nothing_held(own_daemon, "a client that was closed without its daemon")


def test_pins_of_a_former_daemon_are_given_back(own_daemon):
    """Pins of a former daemon are freed as soon as the views are gone, while the process lives."""
    count = 200  # 12.5 MiB of the tier's 32; a session may hold 16
    spec = NamespaceSpec(model="held", tokens_per_block=1, block_bytes=BLOCK_BYTES)
    with Client(own_daemon.target) as client:
        ns = client.open_namespace(spec)
        for round_ in range(3):
            tokens = [round_ * 1000 + i for i in range(count)]
            assert client.put(ns, tokens, [bytes(BLOCK_BYTES)] * count).stored == count
            views = client.get(ns, tokens).views
            assert len(views) == count
            own_daemon.restart()
            del views
        # Three times 12.5 MiB were held in turn. Without releases, pins would fill the 32 MiB tier.
        assert client.put(ns, list(range(9000, 9000 + count)), [bytes(BLOCK_BYTES)] * count).stored == count


def test_best_effort_through_a_restart(own_daemon):
    """A best-effort client survives the daemon's death without an error, and hits again afterwards."""
    with Client(own_daemon.target, best_effort=True) as client:
        ns = put(client, model="effort")
        own_daemon.kill()
        assert not client.get(ns, TOKENS)
        assert client.put(ns, TOKENS, blocks_of(0)).stored == 0
        own_daemon.start()
        client._connector._next_try = 0.0
        assert client.get(ns, TOKENS).tokens == 40


def test_forked_children(daemon):
    """In a forked child handles raise ForkedClient; child and parent have their own sessions."""
    run_program(
        daemon.target,
        """
        client = Client(TARGET)
        ns = client.open_namespace(NamespaceSpec(model="fork", tokens_per_block=16, block_bytes=65536))
        assert client.put(ns, TOKENS, [bytes([i + 1]) * 65536 for i in range(3)])
        lease = client.acquire(ns, ns.hash(TOKENS))
        view = lease.view(0)
        pages = client.reserve(PutGroup.private(ns, 1))
        page = pages.buffer(0)
        mine = client._connector.link.session.id

        def work():
            for use in (lease.views, pages.buffers, pages.commit, lease.check):
                try:
                    use()
                except ForkedClient:
                    continue
                raise AssertionError(use)
            got = client.get(ns, TOKENS)
            assert got.tokens == 40 and set(got.views[2].tolist()) == {3}
            assert client._connector.link.session.id != mine
            assert client.put(ns, [os.getpid()] * 16, [b"x" * 65536])
            del got
            gc.collect()
            os._exit(0)

        for _ in range(5):
            in_child(work)
            assert set(view.tolist()) == {1}
            assert client.get(ns, TOKENS).tokens == 40
            assert client._connector.link.session.id == mine
        page[:] = 9
        assert pages.commit(ns.naming(ns.hash([5] * 16), index=[0])).statuses.tolist() == [1]
        del view, page
        lease.release()
        client.close()
        """,
    )


def test_forks_while_threads_call(daemon):
    """Forks during other threads' calls neither block nor harm the child or the parent."""
    run_program(
        daemon.target,
        """
        client = Client(TARGET, timeout_s=30)
        ns = client.open_namespace(NamespaceSpec(model="busy", tokens_per_block=16, block_bytes=65536))
        assert client.put(ns, TOKENS, [bytes(65536)] * 3)
        ending = threading.Event()
        def call():
            while not ending.is_set():
                assert client.get(ns, TOKENS).tokens == 40
        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads: thread.start()
        def work():
            assert client.get(ns, TOKENS).tokens == 40
        for _ in range(15):
            in_child(work)
        ending.set()
        for thread in threads: thread.join()
        """,
    )


def test_a_child_of_an_asyncio_worker(daemon):
    """A process forks after using AsyncClient, and the child reads through its own client."""
    run_program(
        daemon.target,
        """
        import asyncio
        async def work(client):
            ns = await client.open_namespace(NamespaceSpec(model="aio", tokens_per_block=16, block_bytes=65536))
            await client.put(ns, TOKENS, [bytes(65536)] * 3)
            return (await client.get(ns, TOKENS)).tokens
        client = AsyncClient(TARGET)
        assert asyncio.run(work(client)) == 40
        def child():
            assert asyncio.run(work(client)) == 40
            with Client(TARGET) as other:
                ns = other.open_namespace(NamespaceSpec(model="aio", tokens_per_block=16, block_bytes=65536))
                assert other.get(ns, TOKENS).tokens == 40
        for _ in range(5):
            in_child(child)
        assert asyncio.run(work(client)) == 40
        async def busy():
            tasks = [asyncio.create_task(work(client)) for _ in range(40)]
            for _ in range(5):
                await asyncio.sleep(0)
                in_child(child_alone)
            assert set(await asyncio.gather(*tasks)) == {40}
        def child_alone():
            with Client(TARGET) as other:
                ns = other.open_namespace(NamespaceSpec(model="aio", tokens_per_block=16, block_bytes=65536))
                assert other.get(ns, TOKENS).tokens == 40
        asyncio.run(busy())
        """,
    )


def test_a_killed_client_leaves_nothing(daemon):
    """The daemon frees a killed client's pages without a timeout, and the next client can have them."""
    body = """
        client = Client(TARGET)
        ns = client.open_namespace(NamespaceSpec(model="killed-client", tokens_per_block=1, block_bytes=65536))
        pages = client.reserve(PutGroup.private(ns, 200))
        assert set(pages.statuses.tolist()) == {2}
        os.kill(os.getpid(), signal.SIGKILL)
        """
    for _ in range(4):  # each takes 12.5 MiB of 32
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(body), daemon.target],
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == -9, done.stderr


async def test_async_client(daemon):
    """The asynchronous client puts, gets and watches on the real daemon."""
    async with AsyncClient(daemon.target) as client:
        ns = await client.open_namespace(NamespaceSpec(model="async", tokens_per_block=16, block_bytes=BLOCK_BYTES))
        watcher = aiter(client.watch())
        first = asyncio.ensure_future(anext(watcher))
        while not first.done():  # a watch sees only blocks stored after it begins
            tokens = np.random.default_rng().integers(0, 1 << 30, 16).tolist()
            assert await client.put(ns, tokens, [block(1)])
        assert (await first).namespace == ns.id
        await watcher.aclose()
        got = await asyncio.gather(*(client.get(ns, tokens) for _ in range(8)))
        assert all(np.array_equal(g.views[0], block(1)) for g in got)


def test_tenants_are_apart(tmp_path):
    """The credential names the tenant. Other tenants miss its blocks, and a wrong credential is refused."""
    file = tmp_path / "credentials"
    file.write_text("red 0123456789abcdef-red\nblue 0123456789abcdef-blue\n")
    file.chmod(0o600)
    with Daemon(SMALL + f'\n[identity]\ncredential_file = "{file}"\n') as daemon:
        for name in ("red", "blue", "wrong"):
            (tmp_path / name).write_text(f"0123456789abcdef-{name}")
        with Client(daemon.target, credential_file=str(tmp_path / "red")) as red:
            put(red, model="tenants")
            with Client(daemon.target, credential_file=str(tmp_path / "blue")) as blue:
                assert not blue.get(blue.open_namespace(NamespaceSpec("tenants", 16, BLOCK_BYTES)), TOKENS)
            with Client(daemon.target, credential_file=str(tmp_path / "wrong")) as wrong, pytest.raises(NotPermitted):
                wrong.open_namespace(SPEC)


def test_remote(tmp_path):
    """Over TCP with a bearer credential, a get gives the put blocks byte for byte."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file = tmp_path / "bearer"
    file.write_text("a-bearer-credential-of-length")
    file.chmod(0o600)
    config = SMALL.replace("[server]", f'[server]\ntcp_listen = "127.0.0.1:{port}"\ntcp_credential_file = "{file}"')
    spec = NamespaceSpec(model="remote", tokens_per_block=16, block_bytes=1500 << 10)
    data = [np.random.default_rng(i).integers(0, 256, 1500 << 10, dtype=np.uint8) for i in range(2)]
    with Daemon(config), Client(f"127.0.0.1:{port}", credential_file=str(file)) as client:
        ns = client.open_namespace(spec)
        assert client.put(ns, TOKENS[:32], data, durable=True).stored == 2
        got = client.get(ns, TOKENS[:32])
        assert [np.array_equal(a, b) for a, b in zip(got.views, data, strict=True)] == [True, True]
        out = bytearray(2 * (1500 << 10))
        assert client.get(ns, ns.hash(TOKENS[:32]), out=out).blocks == 2
        assert bytes(out) == b"".join(part.tobytes() for part in data)


def test_chains(daemon):
    """Later blocks continue the chain of an earlier put."""
    with Client(daemon.target) as client:
        ns = put(client, model="chain")
        hashes = ns.hash(list(range(64)))
        more = PutGroup(ns, hashes[2:], parent=hashes[1].tobytes(), position=2)
        assert client.put(ns, more, blocks_of(1, 2)).stored == 2
        assert client.get(ns, list(range(64))).tokens == 64
