"""An Admin service that answers from a table of replies and records every request."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from tierd._proto import admin_pb2 as pb
from tierd._proto import admin_pb2_grpc
from tierd.cli.admin import Connection
from tierd.core.formats.model import TierKind
from tierd.errors import ERROR_KEY, TierdError

HASH = bytes(range(32))
COUNTERS = {
    'tierd_tokens_hit_total{tier="host.0"}': 600,
    'tierd_tokens_hit_total{tier="nvme.0"}': 200,
    'tierd_tokens_missed_total{reason="absent"}': 150,
    'tierd_tokens_missed_total{reason="busy"}': 50,
    "tierd_lookups_total": 99,
    "tierd_idle_total": 0,
}


class FakeAdmin(admin_pb2_grpc.AdminServicer):  # type: ignore[misc]
    """answers: reply, or error, by method name; asked: every (method, request, token) in order."""

    def __init__(self) -> None:
        self.answers: dict[str, Message | TierdError] = samples()
        self.asked: list[tuple[str, Message, str]] = []

    @property
    def last(self) -> Any:
        """The latest request."""
        return self.asked[-1][1]

    def __getattribute__(self, name: str) -> Any:
        if not name[:1].isupper():
            return super().__getattribute__(name)
        return lambda request, context: self.reply(name, request, context)

    def reply(self, name: str, request: Message, context: grpc.ServicerContext) -> Message:
        """Returns the table's reply, or aborts with its error as the daemon does."""
        self.asked.append((name, request, dict(context.invocation_metadata()).get("tierd-session", "")))
        answer = self.answers[name]
        if isinstance(answer, TierdError):
            context.set_trailing_metadata(((ERROR_KEY, type(answer).__name__),))
            context.abort(grpc.StatusCode.INTERNAL, str(answer))
        return answer


@contextmanager
def served(admin: FakeAdmin, directory: Path) -> Iterator[Connection]:
    """A connection to the service over a unix socket."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
    address = f"unix:{directory / 'tierd.sock'}"
    server.add_insecure_port(address)
    server.start()
    channel = grpc.insecure_channel(address)
    try:
        yield Connection(channel, metadata=(("tierd-session", "token-1"),), close=lambda: None)
    finally:
        channel.close()
        server.stop(None)


def samples() -> dict[str, Message | TierdError]:
    """The replies of a busy daemon."""
    block = pb.BlockInfo(
        hash=HASH, parent=bytes(32), namespace=1, position=0, tokens=512, bytes=65536, pins=2, hits=41, idle_s=3.25,
        tiers=["host.0", "nvme.0"],
    )  # fmt: skip
    return {
        "Status": pb.StatusReply(
            version="0.1.0", instance="ab12cd34" * 4, pid=4711, uptime_s=11_532, state="serving", sessions=3, leases=12,
            blocks=10_234, cpu_s=84.2, counters=COUNTERS,
            notices=["host.0: no huge pages here (shmem_enabled is never); first touch is slower"],
        ),
        "Wear": pb.WearReply(stores=worn_stores()),
        "Ceiling": pb.CeilingReply(windows=ceiling_windows(), rate=0.125),
        "Tiers": pb.TiersReply(
            tiers=[
                tier("device.0", TierKind.DEVICE, capacity=256 << 20, used=100 << 20, unready=64 << 20, reason="no room"),
                tier("host.0", TierKind.HOST, capacity=512 << 20, used=470 << 20, unready=32 << 20),
                tier("nvme.0", TierKind.NVME, capacity=4 << 30, used=4 << 30, mode="o_direct"),
            ]
        ),
        "Blocks": pb.BlocksReply(blocks=[block], total=61),
        "Inspect": pb.InspectReply(
            block=block,
            pages=[pb.PageInfo(tier="host.0", state="ready", segment=7, slot=3, offset=196608, generation=812, pins=2)],
            children=[bytes(31) + b"\1"], digest=bytes(16), slices=4,
        ),
        "Sessions": pb.SessionsReply(
            sessions=[
                pb.SessionInfo(
                    id=5, pid=99, uid=1000, tenant="search", name="vllm-worker-0", sdk="0.1.0", state="open", age_s=310,
                    leases=4, pinned_bytes=96 << 20, reserved_bytes=2 << 20, reservations=1,
                )
            ]
        ),
        "Namespaces": pb.NamespacesReply(
            namespaces=[
                pb.NamespaceInfo(
                    id=1, tenant="search", epoch=2, model="llama-3-8b", blocks=61, current=True,
                    text='{"spec": {"tokens_per_block": 16, "block_bytes": 2097152}}',
                )
            ]
        ),
        "Tree": tree(),
        "Evict": pb.EvictReply(blocks=3, bytes=3 << 20, pinned=1),
        "Pin": pb.PinReply(blocks=1),
        "Unpin": pb.PinReply(blocks=1),
        "Drain": pb.DrainReply(leases_left=2),
        "Flush": pb.FlushReply(blocks=8, bytes=8 << 20),
        "BumpEpoch": pb.BumpEpochReply(namespaces=1, blocks=61),
        "RecordStart": pb.RecordReply(state="recording", path="/state/a.jsonl.gz", max_bytes=1 << 28, seconds=3600),
        "RecordStop": recorded("ended", reason="stopped"),
        "RecordStatus": recorded("recording", lost=3),
    }  # fmt: skip


def tree() -> pb.TreeReply:
    """A run of six blocks, two runs that follow it, and one without its start."""
    common = {"blocks": 6, "tokens": 96, "hits": 41, "tier_blocks": {"host.0": 4, "nvme.0": 2}}
    return pb.TreeReply(
        nodes=[
            pb.TreeNode(hash=HASH, parent=-1, namespace=1, children=3, leaves=3, blocks_below=9, tokens_below=144,
                        hits_below=7, idle_s=3.25, **common),  # type: ignore[arg-type]
            pb.TreeNode(hash=bytes(31) + b"\1", parent=0, namespace=1, position=6, blocks=3, tokens=48, hits=5, leaves=1,
                        tier_blocks={"nvme.0": 3}, idle_s=60),
            pb.TreeNode(hash=bytes(31) + b"\2", parent=0, namespace=1, position=6, blocks=3, tokens=48, leaves=1,
                        tier_blocks={"host.0": 3}, idle_s=90),
            pb.TreeNode(hash=b"\3" * 8, parent=-1, namespace=2, position=4, blocks=1, tokens=16, leaves=1,
                        tier_blocks={"host.0": 1}, idle_s=120),
        ],
        blocks=19, tokens=304, tokens_shared=96, runs=5, is_cut=True, blocks_cut_off=1,
    )  # fmt: skip


def recorded(state: str, *, reason: str = "", lost: int = 0) -> pb.RecordReply:
    """The reply for a recording that is running or has ended."""
    return pb.RecordReply(
        state=state, name="a", path="/state/a.jsonl.gz", reason=reason, requests=6848, blocks=171_316, distinct=111_932,
        lost=lost, bytes=462_000, max_bytes=1 << 28, elapsed_s=2126, seconds=3600,
    )  # fmt: skip


def tier(
    name: str, kind: TierKind, *, capacity: int, used: int, mode: str = "tmpfs", unready: int = 0, reason: str = ""
) -> pb.TierInfo:
    """The reply for one tier."""
    return pb.TierInfo(
        name=name, kind=int(kind), capacity_bytes=capacity, used_bytes=used, assigned_bytes=used, pages_ready=used >> 16,
        pages_pinned=12, pages_reserved=1, pages_retiring=2, evictions=1234, bytes_read=3 << 30, bytes_written=2 << 30,
        place=f"/somewhere/{name}", mode=mode, serving=True, unready_bytes=unready, unready_reason=reason,
        classes=[pb.ClassInfo(class_bytes=65536, domain=1, segments=4, pages=64, pages_free=9)],
    )  # fmt: skip


def worn_stores() -> list[pb.StoreWear]:
    """One store whose drive reports its wear, and one whose drive does not."""
    told = pb.DriveInfo(
        device="/dev/nvme0n1", model="Fast 9", capacity_bytes=3_840_755_982_336, has_health=True, percentage_used=3,
        written_bytes=237_774_404_000_000, power_on_hours=27567,
    )  # fmt: skip
    silent = pb.DriveInfo(
        device="/dev/nvme1n1", trouble="/dev/nvme1n1: nvme-cli is not installed; install it (package nvme-cli)"
    )
    return [
        pb.StoreWear(
            tier="nvme.0", path="/var/lib/tierd/nvme-0", capacity_bytes=2 << 40, admission="learned", written_today_bytes=812 << 30,
            written_since_start_bytes=3 << 40, written_bytes=51 << 40, write_bytes_per_s=21e6, has_budget=True,
            budget_bytes_per_day=2 << 40, budget_burst_bytes=512 << 30, budget_left_bytes=101 << 30,
            declined={"partial": 4127, "unlikely": 129, "budget": 20311}, drives=[told], has_life=True, life_days=37138.0,
            life_basis="the drive's own 3 % used in 1149 days of power",
        ),
        pb.StoreWear(
            tier="nvme.1", path="/mnt/two/tierd", capacity_bytes=1 << 40, admission="all", written_today_bytes=1 << 30,
            drives=[silent], life_basis="the drive reports no wear; set endurance_dwpd or endurance_tbw",
        ),
    ]  # fmt: skip


def ceiling_windows() -> list[pb.CeilingWindow]:
    """An hour of requests: the day's window has seen no more than the hour's."""
    shares = {0.5: 0.3, 1.0: 0.41, 2.0: 0.52, 4.0: 0.58, 0.0: 0.61}
    points = [
        pb.CeilingPoint(factor=factor, bytes=int(factor * (320 << 30)), hit_ratio=share)
        for factor, share in shares.items()
    ]
    return [
        pb.CeilingWindow(seconds=seconds, covered_s=min(seconds, 4000), tokens=81920, hit_ratio=0.4, points=points)
        for seconds in (900, 3600, 86400)
    ]
