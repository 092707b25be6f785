"""`tierctl explain` names planted causes, by a request's id, a block's hash or a prompt's tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.system.blocks import await_true
from tests.system.damaged import flip, slots
from tests.system.warm import Daemon
from tierd._proto import admin_pb2 as pb
from tierd.cli import ctl
from tierd.cli.admin import connect
from tierd.cli.exits import ExitCode
from tierd.client import Client, Group, NamespaceSpec, OpenedNamespace, PutGroup
from tierd.codecs.values import KVShape
from tierd.core.formats.block import KVGeometry
from tierd.decisions.causes import Cause
from tierd.errors import DeadlineExceeded, Overloaded
from tierd.tiers.store.slots import HEADER_BYTES

SIZE, BLOCK_BYTES, COUNT = 16, 64 << 10, 6
PROMPT = list(range(SIZE * COUNT))
MEMORY = '[[host]]\ncapacity = "4 MiB"\nsegment = "1 MiB"\n'
DISK = '[[nvme]]\ncapacity = "64 MiB"\nsegment = "4 MiB"\n'
SPEC = NamespaceSpec(model="llama", tokens_per_block=SIZE, block_bytes=BLOCK_BYTES)
FILL = NamespaceSpec(model="other", tokens_per_block=SIZE, block_bytes=BLOCK_BYTES)


def values(row: int, nbytes: int) -> np.ndarray:
    """A block of bfloat16 values, which a codec can encode."""
    drawn = np.random.default_rng(row).standard_normal(nbytes // 2).astype(np.float32)
    return (drawn.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


class World:
    """A daemon, a client that has stored the prompt, and the operator's program."""

    def __init__(self, daemon: Daemon, client: Client, space: OpenedNamespace, root: Path) -> None:
        self.daemon, self.client, self.space, self.root = daemon, client, space, root
        self.put(space)

    def put(self, space: OpenedNamespace, tokens: list[int] = PROMPT, *, durable: bool = False) -> None:
        """Stores a prompt."""
        blocks = [values(row, space.spec.block_bytes) for row in range(len(space.hash(tokens)))]
        assert self.client.put(space, tokens[: len(blocks) * SIZE], blocks, durable=durable)

    def fill(self, count: int = 80, part: int = 0) -> None:
        """Stores so many other blocks, one a put. part: which ones."""
        space = self.client.open_namespace(FILL)
        for i in range(part * count, (part + 1) * count):
            self.put(space, list(range(1000 * i, 1000 * i + SIZE)))

    def ctl(self, *arguments: str) -> Any:
        """The JSON of a verb."""
        done = CliRunner().invoke(ctl.cli, [*arguments, "--json", "--target", self.daemon.target], prog_name="tierctl")
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def request(self, name: str = "request-7") -> dict[str, Any]:
        """The latest decision about a request."""
        await_true(lambda: bool(self.ctl("explain", name)["requests"]), f"a record of {name}")
        found: dict[str, Any] = self.ctl("explain", name)["requests"][0]
        assert found["request"] == name
        return found

    def prompt(self, tokens: list[int] = PROMPT) -> list[dict[str, Any]]:
        """The causes of a prompt's blocks, of a token file."""
        path = self.root / "prompt.json"
        path.write_text(json.dumps(tokens), encoding="utf-8")
        found: list[dict[str, Any]] = self.ctl("explain", str(path), "--namespace", str(self.space.id))["blocks"]
        return found

    def get(self) -> int:
        """Gets the prompt as the request."""
        return self.client.get(self.space, PROMPT, request="request-7").tokens


@contextmanager
def world(
    tmp_path: Path, config: str = MEMORY, spec: NamespaceSpec = SPEC, *, faults: bool = False, error_limit: float = 0.0
) -> Iterator[World]:
    """A world with this configuration."""
    if "[[nvme]]" not in config:
        config = "nvme = []\n" + config
    with Daemon(config, faults=faults) as daemon, Client(daemon.target) as client:
        yield World(daemon, client, client.open_namespace(spec, error_limit=error_limit), tmp_path)


def hit_near(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path) as its:
        assert its.get() == len(PROMPT)
        found = its.request()
        assert found["tier_tokens"] == {"host.0": len(PROMPT)} and found["waited_s"] == 0
        yield found["cause"]


def hit_far(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path, MEMORY + DISK) as its:
        on_disk_alone(its)
        assert its.get() == len(PROMPT)
        found = its.request()
        assert found["tier_tokens"] == {"nvme.0": len(PROMPT)} and found["waited_s"] > 0
        assert f"{1000 * found['waited_s']:.3g} ms" in found["cause"]["text"]
        yield found["cause"]


def never_stored(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path) as its:
        tokens = PROMPT + [7] * SIZE
        assert its.client.get(its.space, tokens, request="request-7").tokens == len(PROMPT)
        found = its.request()
        assert (found["tokens_asked"], found["tokens_missed"]) == (len(tokens), SIZE)
        assert found["cause"]["hash"] == its.space.hash(tokens)[-1].tobytes().hex()
        its.put(its.space, tokens)
        assert its.request()["cause"] == found["cause"], "a later put does not change what was so"
        its.ctl("evict", found["cause"]["hash"])
        assert its.request()["cause"] == found["cause"], "nor does a later eviction"
        yield found["cause"]


def evicted(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path) as its:
        its.fill()
        assert its.get() == 0
        found = its.request()["cause"]
        facts = found["facts"]
        assert found["tier"] == "host.0" and found["ago_s"] >= 0 and facts["policy"] in found["text"]
        assert 0 < int(facts["rank"]) <= int(facts["candidates"]) and float(facts["idle_s"]) > 0
        assert int(facts["session"]) and "put" in found["text"]
        assert its.ctl("explain", found["hash"][:16])["blocks"][0]["cause"] == found["cause"]
        assert its.prompt()[0]["facts"] == facts
        its.ctl("set", "host.0.eviction=arc")
        assert its.request()["cause"]["facts"] == facts, "the policy of then is named"
        yield found


def not_admitted(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path, MEMORY + DISK) as its:
        tokens = PROMPT + [1] * 5
        hashes = its.space.hash(tokens, with_tail=True)
        assert its.client.put(its.space, tokens, [values(row, BLOCK_BYTES) for row in range(len(hashes))])
        for part in range(20):
            its.fill(20, part)
            with connect(its.daemon.target) as operator:
                operator.ask(pb.QuiesceRequest())
            if its.client.lookup(Group(its.space, hashes, len(tokens), request="request-7")).tokens < len(tokens):
                break
        found = its.request()
        assert found["tokens_missed"] == 5 and found["kind"] == "lookup"
        assert found["cause"]["facts"]["declined"] == "partial"
        yield found["cause"]


def other_namespace(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path) as its:
        shape = KVGeometry(dtype="float8", layout="HND")
        for changed in ({"model": "llama-2"}, {"adapter": "lora"}, {"geometry": shape}, {"tokens_per_block": 8}):
            its.space = its.client.open_namespace(replace(SPEC, **changed))
            assert its.get() == 0 and its.request()["cause"]["cause"] == Cause.NEVER_STORED
            found = its.prompt()[0]
            for name in ("dtype", "layout") if "geometry" in changed else changed:
                assert f"{name}: " in found["facts"]["differs"]
            yield found


def other_salt(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path) as its:
        its.space = its.client.open_namespace(replace(SPEC, salt="seed 1"))
        assert its.get() == 0
        yield its.prompt()[0]


def other_tenant(tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "tenants").write_text("search secret-0123456789\n", encoding="utf-8")
    (tmp_path / "credential").write_text("secret-0123456789\n", encoding="utf-8")
    for path in tmp_path.iterdir():
        path.chmod(0o600)
    with world(tmp_path, f'[identity]\ncredential_file = "{tmp_path}/tenants"\n' + MEMORY) as its:
        with Client(its.daemon.target, credential_file=str(tmp_path / "credential")) as other:
            its.space = other.open_namespace(SPEC)
            assert other.get(its.space, PROMPT).tokens == 0
            found = its.prompt()[0]
        assert "tenant: 'search' here" in found["facts"]["differs"]
        yield found


def epoch_bumped(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path) as its:
        name = its.space.hash(PROMPT)[0].tobytes().hex()
        its.ctl("epoch", "bump", "--model", "llama")
        its.space = its.client.open_namespace(SPEC)
        assert its.get() == 0
        assert "epoch 2" in its.request()["cause"]["text"]
        assert its.ctl("explain", name)["blocks"][0]["cause"] == Cause.EPOCH_BUMPED
        yield its.prompt()[0]


def on_disk_alone(its: World) -> None:
    """Leaves the prompt's blocks on NVMe only."""
    its.put(its.space, durable=True)
    its.ctl("evict", "--tier", "host.0")


def corrupt(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path, MEMORY + DISK) as its:
        on_disk_alone(its)
        bad = its.space.hash(PROMPT)[2].tobytes()
        flip(slots(its.daemon)[bad], HEADER_BYTES + 5)
        assert its.get() == 2 * SIZE
        first = its.request()["cause"]
        assert first["hash"] == bad.hex()
        assert its.get() == 2 * SIZE
        assert its.request()["cause"]["cause"] == Cause.CORRUPT, "a later get misses for the same reason"
        yield first


def read_failed(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path, MEMORY + DISK, faults=True) as its:
        on_disk_alone(its)
        with its.daemon.faults() as faults:
            faults.arm("nvme.slots.before_read", "error:EIO")
            assert its.get() == 0
            faults.disarm()
        yield its.request()["cause"]


def out_of_service(tmp_path: Path) -> Iterator[Any]:
    paused = 'fault_limit = 1\nretry_pause = "60 s"\nretry_pause_limit = "60 s"\n'
    with world(tmp_path, MEMORY + DISK + paused, faults=True) as its:
        on_disk_alone(its)
        with its.daemon.faults() as faults:
            faults.arm("nvme.slots.before_read", "error:EIO")
            its.get()
            await_true(lambda: not its.ctl("tiers")["tiers"][1]["serving"], "the store out of service")
            faults.disarm()
        assert its.get() == 0
        assert its.prompt()[0]["cause"] == Cause.OUT_OF_SERVICE
        yield its.request()["cause"]


def too_coarse(tmp_path: Path) -> Iterator[Any]:
    shape = KVGeometry(layers=4, kv_heads=2, head_dim=128, dtype="bfloat16")
    spec = replace(SPEC, block_bytes=KVShape(shape, SIZE).block_bytes, geometry=shape)
    with world(tmp_path, MEMORY + DISK + 'codec = "int8"\n', spec, error_limit=float("inf")) as its:
        on_disk_alone(its)
        exact = Group(its.space, its.space.hash(PROMPT), error_limit=0.0, request="request-7")
        assert its.client.get(its.space, exact).tokens < len(PROMPT)
        found = its.request()["cause"]
        assert float(found["facts"]["error"]) > 0
        yield found


def evicted_by_operator(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path) as its:
        its.ctl("evict", its.space.hash(PROMPT)[3].tobytes().hex())
        assert its.get() == 3 * SIZE
        yield its.request()["cause"]


def before_record(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path) as its:
        its.ctl("evict", its.space.hash(PROMPT)[3].tobytes().hex())
        its.daemon.restart()
        assert its.get() == 3 * SIZE
        found = its.request()["cause"]
        assert "The record is" in found["text"]
        yield found


def busy(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path, MEMORY + DISK + "\n[mover]\nqueue_blocks = 1\n", faults=True) as its:
        on_disk_alone(its)
        with its.daemon.faults() as faults, Client(its.daemon.target) as other, ThreadPoolExecutor(1) as thread:
            faults.arm("nvme.slots.before_read", "delay:2")
            waiting = thread.submit(other.acquire, other.open_namespace(SPEC), its.space.hash(PROMPT)[1:2])
            assert faults.await_hits("nvme.slots.before_read")
            with pytest.raises((Overloaded, DeadlineExceeded)):  # the client asks again until its deadline
                its.client.get(its.space, PROMPT, request="request-7", timeout_s=1)
            faults.disarm()
            waiting.result().release()
        yield its.request()["cause"]


def no_room(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path) as its:
        space, tokens = its.client.open_namespace(FILL), list(range(5000, 5000 + 28 * SIZE))
        its.put(space, tokens)
        with its.client.acquire(space, space.hash(tokens)) as held:
            assert held.tokens == len(tokens)
            with its.client.acquire(Group(its.space, its.space.hash(PROMPT), request="request-7")) as lease:
                assert lease.tokens < len(PROMPT)
            yield its.request()["cause"]


def slower_than_computing(tmp_path: Path) -> Iterator[Any]:
    with world(tmp_path) as its:
        its.client.lookup(Group(its.space, its.space.hash(PROMPT + [1] * SIZE), request="request-7"))
        its.client.note_computed("request-7", len(PROMPT), times=(0.012, 0.005))
        its.client.lookup(Group(its.space, its.space.hash([1] * SIZE), request="request-8"))
        found = its.request()
        assert (found["kind"], found["model"], found["tokens_missed"]) == ("computed", "llama", len(PROMPT))
        assert "12 ms" in found["cause"]["text"] and "5 ms" in found["cause"]["text"]
        yield found["cause"]


CASES: dict[Cause, Callable[[Path], Iterator[Any]]] = {
    Cause.HIT_NEAR: hit_near,
    Cause.HIT_FAR: hit_far,
    Cause.NEVER_STORED: never_stored,
    Cause.BEFORE_RECORD: before_record,
    Cause.EVICTED: evicted,
    Cause.NOT_ADMITTED: not_admitted,
    Cause.OTHER_NAMESPACE: other_namespace,
    Cause.OTHER_SALT: other_salt,
    Cause.OTHER_TENANT: other_tenant,
    Cause.EPOCH_BUMPED: epoch_bumped,
    Cause.CORRUPT: corrupt,
    Cause.READ_FAILED: read_failed,
    Cause.OUT_OF_SERVICE: out_of_service,
    Cause.TOO_COARSE: too_coarse,
    Cause.EVICTED_BY_OPERATOR: evicted_by_operator,
    Cause.BUSY: busy,
    Cause.NO_ROOM: no_room,
    Cause.SLOWER_THAN_COMPUTING: slower_than_computing,
}


@pytest.mark.parametrize("cause", CASES)
def test_a_planted_cause_is_named(cause: Cause, tmp_path: Path) -> None:
    """After a situation with one cause, `tierctl explain` names that cause."""
    for found in CASES[cause](tmp_path):
        assert found["cause"] == cause, found


def shown(its: World, *arguments: str) -> tuple[int, str]:
    """Exit code and text of `tierctl explain` without --json."""
    done = CliRunner().invoke(ctl.cli, ["explain", *arguments, "--target", its.daemon.target], prog_name="tierctl")
    return done.exit_code, done.output


def test_a_tier_made_smaller_is_the_reason(tmp_path: Path) -> None:
    """Blocks that left with the memory of their tier miss because of the operator, not of a policy."""
    with world(tmp_path) as its:
        its.fill(20)
        its.ctl("set", "host.0.capacity=1 MiB")
        assert its.get() == 0
        cause = its.request()["cause"]
        assert cause["cause"] == Cause.EVICTED_BY_OPERATOR and "smaller" in cause["text"]


def test_people_read_the_reasons(tmp_path: Path) -> None:
    """The text has the latest misses first, the reasons, the runs of a prompt and the record's size."""
    with world(tmp_path) as its:
        for name in ("first", "second"):
            assert its.client.get(its.space, [7] * SIZE, request=name).tokens == 0
        its.client.get(its.space, PROMPT, request="third")
        await_true(lambda: len(its.ctl("explain")["requests"]) == 3, "three decisions")
        lines = shown(its, "--misses", "--last", "5")[1].splitlines()
        assert [line.split()[2] for line in lines[1:3]] == ["second", "first"]
        assert lines[-1].startswith("the record: 3 decisions") and lines[-1].endswith("MiB of memory")
        assert "get: hit_near: Served from memory." in shown(its, "third")[1]
        assert "token ids" in shown(its, "fir")[1], "a prefix of an id is enough; a token file tells more"
        path = tmp_path / "prompt"
        path.write_text(" ".join(map(str, [*PROMPT, 1])), encoding="utf-8")
        text = shown(its, str(path))[1]
        assert "0-5" in text and "host.0 holds it." in text and "96-96" in text and "never_stored" in text
        assert shown(its, its.space.hash(PROMPT)[0].tobytes().hex()[:10])[1].count("hit_near") == 1


def test_bad_questions_have_remedies(tmp_path: Path) -> None:
    """Unknown names, bad token files and ambiguous namespaces are errors that name the remedy."""
    with world(tmp_path) as its:
        its.fill(1)
        path = tmp_path / "prompt"
        for text, said in (
            ("[1, 2", "write `[1, 2, 3]`"),
            ("a b", "write `[1, 2, 3]`"),
            ("", "no token ids"),
            ("1 -2", ""),
        ):
            path.write_text(text, encoding="utf-8")
            code, output = shown(its, str(path), "--model", "llama")
            assert code == ExitCode.USAGE and said in output, output
        path.write_text("1 2 3", encoding="utf-8")
        for given, said in (
            ([str(path)], "choose one with --namespace, `tierctl namespaces`"),
            ([str(path), "--namespace", "77"], "tierctl namespaces"),
            (["request-of-nobody"], "tierctl explain --last 20"),
            (["abc123"], "no tier holds it"),
        ):
            code, output = shown(its, *given)
            assert code != 0 and said in output, output


def test_the_rank_that_lacks_a_block_is_named(tmp_path: Path) -> None:
    """If one of two ranks lost a block, a lookup of both misses for the reason of that rank."""
    with world(tmp_path, spec=replace(SPEC, rank_count=2)) as its:
        hashes = its.space.hash(PROMPT)
        blocks = [values(row, BLOCK_BYTES) for row in range(COUNT)]
        assert its.client.put(its.space, PutGroup(its.space, hashes, rank=1), blocks)
        its.ctl("evict", "--tier", "host.0")
        for rank, count in ((0, COUNT), (1, 4)):
            assert its.client.put(its.space, PutGroup(its.space, hashes[:count], rank=rank), blocks[:count])
        both = Group(its.space, hashes, ranks=(0, 1), request="request-7")
        assert its.client.lookup(both).tokens == 4 * SIZE
        found = its.request()["cause"]
        assert (found["cause"], found["namespace"]) == (Cause.EVICTED_BY_OPERATOR, its.space.id + 1)
        assert its.prompt()[4]["namespace"] == its.space.id + 1 and its.prompt()[3]["cause"] == Cause.HIT_NEAR
