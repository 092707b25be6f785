"""Every setting of the daemon: its name, default, bounds, unit and meaning.

The one table of settings, as frozen dataclasses; config.py reads files and checks settings against
each other. Sizes are read as bytes and durations as seconds. Each field has a description, and a
unit if a number or a text has one.

`configs/reference.toml` is rendered from this module by tools/gen_reference.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from tierd.core.formats.model import PAGE_ALIGN_BYTES
from tierd.units import parse_bytes, parse_rate, parse_seconds

Bytes = Annotated[int, BeforeValidator(parse_bytes)]
"""An int in bytes; in TOML also a text such as "512 MiB"."""
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
"""A float in seconds; in TOML also a text such as "5 s"."""
Rate = Annotated[int, BeforeValidator(parse_rate)]
"""An int in bytes per second; in TOML also a text such as "100 MiB/s"."""
SegmentSize = Annotated[int, BeforeValidator(lambda value: AUTO if value == "auto" else parse_bytes(value))]
"""Bytes; AUTO until the config is resolved, then it is the size."""
AUTO = -1

RATED_YEARS = 5.0
"""The years over which makers rate drive writes per day."""
DAYS_PER_YEAR = 365.0

_CLOSED = ConfigDict(extra="forbid", validate_default=True)


def _key(default: Any, meaning: str, *, unit: str = "", least: float | None = None, most: float | None = None) -> Any:
    """A setting: its default as written in TOML, meaning, unit and bounds (both inclusive)."""
    strict = True if isinstance(default, int | float) else None  # no "3" for 3, no 1 for true
    return Field(
        default=default, strict=strict, description=meaning, ge=least, le=most, json_schema_extra={"unit": unit}
    )


def _high_watermark() -> Any:
    return _key(
        0.80,
        "Above this fill level the coldest blocks are copied to the next tier in the background. "
        "They stay here until space is needed.",
        unit="share of capacity",
        least=0.0,
        most=1.0,
    )


def _low_watermark() -> Any:
    return _key(
        0.70, "Background copying continues down to this fill level.", unit="share of capacity", least=0.0, most=1.0
    )


def _headroom() -> Any:
    return _key(
        0.0,
        "Share of the capacity that the daemon keeps free: between requests it evicts the coldest blocks. "
        "New blocks then displace nothing of more value.",
        unit="share of capacity",
        least=0.0,
        most=0.9,
    )


def _segment() -> Any:
    return _key(
        "auto",
        "Size of a segment: memory moves between size classes, trust domains and writers in segments. "
        "It must divide the capacity. "
        '"auto": about 1/32 of the capacity, a power of two from 1 MiB to 1 GiB. '
        "If eight segments of 16 MiB fit, it is at least 16 MiB. "
        "The capacity is then rounded down to whole segments.",
        unit="bytes",
    )


def _eviction() -> Any:
    return _key(
        "reuse-index",
        "Policy that chooses which blocks to evict. tierd/policies/README.md describes them.",
    )


@dataclass(frozen=True, config=_CLOSED)
class ServerConfig:
    """The daemon itself: directories, limits, listeners, logs."""

    runtime_dir: str = _key(
        "",
        "Directory of tierd.sock and session.sock. Empty: TIERD_RUNTIME_DIR, else $XDG_RUNTIME_DIR/tierd, else /run/tierd,"
        " else /tmp/tierd-<uid>.",
        unit="path",
    )
    state_dir: str = _key(
        "",
        "Directory of the state that outlives a restart. Empty: TIERD_STATE_DIR, else "
        "$XDG_STATE_HOME/tierd, else /var/lib/tierd, else ~/.local/state/tierd.",
        unit="path",
    )
    session_limit: int = _key(
        256, "Open sessions at most; the daemon refuses more.", unit="sessions", least=1, most=65536
    )
    queue_limit: int = _key(
        256, "Calls in progress at most; the daemon refuses more.", unit="calls", least=1, most=65536
    )
    session_credits: int = _key(
        64,
        "Calls that one session may have in progress, at most half of queue_limit. The daemon tells it "
        "to each client. It refuses more, and disconnects a client that keeps exceeding it.",
        unit="calls",
        least=1,
        most=65536,
    )
    max_batch_blocks: int = _key(
        65536,
        "Blocks in one call, counted over ranks. The daemon refuses more. "
        "The default is a million tokens in blocks of 16.",
        unit="blocks",
        least=1,
        most=100_000,
    )
    call_timeout: Seconds = _key("30 s", "Deadline of calls that set none.", unit="seconds", least=0.001)
    shutdown_deadline: Seconds = _key(
        "10 s",
        "At shutdown the daemon waits this long for calls and transfers, then cancels them.",
        unit="seconds",
        least=0.0,
    )
    loop_warning: Seconds = _key(
        "1 s",
        "If the event loop hangs this long, the daemon logs the stack of every thread.",
        unit="seconds",
        least=0.1,
    )
    loop_limit: Seconds = _key(
        "30 s",
        "If the event loop hangs this long, the daemon ends, so that its supervisor restarts it warm.",
        unit="seconds",
        least=0.1,
    )
    session_share: float = _key(
        0.5,
        "Share of a tier that one session may hold pinned and reserved.",
        unit="share of capacity",
        least=0.01,
        most=1.0,
    )
    clock: Literal["monotonic", "replay"] = _key(
        "monotonic",
        'Source of time. "replay": each request carries the time, and background work runs only in '
        "Quiesce calls. A recorded trace then gives the same answers every time.",
    )
    tcp_listen: str = _key(
        "",
        "host:port for clients without shared memory. Loopback only; needs tcp_credential_file. Empty: off.",
        unit="address",
    )
    tcp_credential_file: str = _key(
        "", "File with the bearer credential that every call over TCP must carry.", unit="path"
    )
    metrics_listen: str = _key("", "host:port of /metrics for Prometheus; loopback only. Empty: off.", unit="address")
    log_format: Literal["console", "json"] = _key("console", "Log lines as text, or one JSON object a line.")
    log_level: Literal["debug", "info", "warning", "error"] = _key("info", "The lowest level that is logged.")
    watch_queue_events: int = _key(
        10000,
        "Events kept for a slow watcher. The daemon drops more, and tells the watcher.",
        unit="events",
        least=1,
        most=10**7,
    )


@dataclass(frozen=True, config=_CLOSED)
class IdentityConfig:
    """The identity of clients. The tenant comes from here, never from a request."""

    tenants: dict[int, str] = Field(
        default_factory=dict,
        description='Tenant of a uid, such as { "1000" = "search" }. Other uids are tenants of their own, uid-<number>.',
        json_schema_extra={"unit": "uid to name"},
    )
    credential_file: str = _key(
        "",
        "File with one `tenant credential` a line, for containers in which all clients have one uid. "
        "Empty: only uids count.",
        unit="path",
    )


@dataclass(frozen=True, config=_CLOSED)
class DeviceConfig:
    """Pages that attention kernels read in place. None unless configured."""

    kind: Literal["cpu", "cuda"] = _key(
        "cpu",
        'Memory of the pages. "cuda": memory of an NVIDIA GPU, allocated at start; needs a driver, a '
        'host tier and pip install "tierd[gpu]". "cpu": host memory in its place.',
    )
    ordinal: int = _key(
        0,
        "Kind cuda: number of the GPU, as the driver counts those that the daemon sees.",
        unit="number",
        least=0,
        most=1023,
    )
    hang_limit: Seconds = _key(
        "10 s",
        "Kind cuda: if a GPU call takes longer, the daemon kills its GPU process and starts another.",
        unit="seconds",
        least=0.1,
    )
    direct_reads: Literal["auto", "kvikio", "off"] = _key(
        "auto",
        'Kind cuda: "auto" reads from a store straight into the GPU (GPUDirect Storage) if a test read '
        'at start is direct. "kvikio": so, by that package. "off": always through host memory.',
    )
    capacity: Bytes = _key("256 MiB", "Memory of the tier.", unit="bytes", least=PAGE_ALIGN_BYTES)
    segment: SegmentSize = _segment()
    arena_dir: str = _key(
        "", "Directory of the segments, as for a host tier. Empty: beside the host tiers.", unit="path"
    )
    high_watermark: float = _high_watermark()
    low_watermark: float = _low_watermark()
    headroom: float = _headroom()
    eviction: str = _eviction()


@dataclass(frozen=True, config=_CLOSED)
class HostConfig:
    """Host memory, mapped by the clients."""

    capacity: Bytes = _key("512 MiB", "Memory of the tier.", unit="bytes", least=PAGE_ALIGN_BYTES)
    segment: SegmentSize = _segment()
    arena_dir: str = _key(
        "",
        "Directory of the segments, on a tmpfs (mounted with huge=always where it can be) or a hugetlbfs. Empty:"
        " /dev/shm/tierd-<uid>/<instance>.",
        unit="path",
    )
    verify: Literal["first_hit", "sampled", "always"] = _key(
        "first_hit",
        "When views are verified, if a client could have changed the page since its commit. "
        "first_hit: before the first view of another client. sampled: some later views too. "
        "always: every view. Gets that copy always verify.",
    )
    sealed_puts: bool = _key(
        False,
        "For untrusted writers. Commit copies their pages to pages that no client can write, and hashes "
        "the copy. A put then needs twice its space until its commit, and a copy longer.",
    )
    release_on_exit: bool = _key(False, "Free the memory at shutdown. The next start is then cold.")
    high_watermark: float = _high_watermark()
    low_watermark: float = _low_watermark()
    headroom: float = _headroom()
    eviction: str = _eviction()


@dataclass(frozen=True, config=_CLOSED)
class NvmeConfig:
    """A store on a disk."""

    path: str = _key("", "Directory of the store. Empty: nvme-<index> in server.state_dir.", unit="path")
    capacity: Bytes = _key(
        "4 GiB", "Disk space of the store, allocated at start.", unit="bytes", least=PAGE_ALIGN_BYTES
    )
    segment: SegmentSize = _segment()
    direct: Literal["auto", "on", "off"] = _key(
        "auto",
        'O_DIRECT, without the page cache. "auto": if the file system supports it, else buffered with a '
        'log line. "on": fail without it.',
    )
    level: int = _key(
        1,
        "Stores get what those of the level before evict. 1: disks. 0: memory (a tmpfs), which is not durable.",
        unit="number",
        least=0,
        most=3,
    )
    codec: str = _key(
        "",
        'Codec of the stored blocks, such as "lossless" or "rot-8-4"; `tierctl codecs` lists them. Empty: blocks stay '
        "as they are. A lossy one is used for namespaces whose clients accept an error.",
        unit="codec",
    )
    queue_depth: int = _key(
        16,
        "Concurrent reads at the disk, and as many writes. Half as many writes during reads.",
        unit="requests",
        least=1,
        most=1024,
    )
    zero_ahead: bool = _key(
        True,
        "Overwrite new space with zeros once, while the disk is idle: first writes take twice as long "
        "otherwise. Not done if writes are limited (wear_budget, endurance).",
    )
    fault_limit: int = _key(
        8,
        "That many failed reads, failed writes or corrupt blocks within fault_window stop writes to the "
        "store. That many failed reads in a row stop reads too. 0: no such limit. "
        "A failed sync stops writes at once. After retry_pause they go on in a new file.",
        unit="faults",
        least=0,
        most=10**6,
    )
    fault_window: Seconds = _key("10 min", "The window of fault_limit.", unit="seconds", least=1.0)
    hang_limit: Seconds = _key(
        "5 s",
        "If a read, write or sync takes longer, the store is out of service until the call returns.",
        unit="seconds",
        least=0.1,
    )
    retry_pause: Seconds = _key(
        "0.5 s", "Wait before retrying a failed store. Doubles after each failure.", unit="seconds", least=0.01
    )
    retry_pause_limit: Seconds = _key("2 s", "The longest wait before a retry.", unit="seconds", least=0.01)
    high_watermark: float = _high_watermark()
    low_watermark: float = _low_watermark()
    headroom: float = _headroom()
    eviction: str = _eviction()
    admission: Literal["learned", "all", "second-touch", "tinylfu"] = _key(
        "learned",
        "Which blocks are written to the store. learned: blocks likely to be used again, as the wear "
        "budget allows. all: every block. second-touch: blocks used twice. tinylfu: blocks used often. "
        "Short last blocks are never written, except by durable puts.",
    )
    wear_budget: Bytes = _key(
        0,
        "Bytes of blocks written a day at most. Unused budget accumulates for wear_burst. "
        "0: from endurance_dwpd or endurance_tbw, else no limit.",
        unit="bytes per day",
        most=10**18,
    )
    wear_burst: Seconds = _key(
        "6 h", "Unused write budget accumulates for this long.", unit="seconds", least=1.0, most=7 * 86400.0
    )
    endurance_dwpd: float = _key(
        0.0,
        "Rated endurance in drive writes per day over five years, of the store's capacity. 0: unknown.",
        unit="drive writes per day",
        least=0.0,
        most=1000.0,
    )
    endurance_tbw: float = _key(
        0.0,
        "Rated endurance in terabytes written; on a shared drive, the store's part. 0: unknown.",
        unit="TB",
        least=0.0,
        most=10.0**6,
    )
    endurance_years: float = _key(
        5.0,
        "Years that the drive should last. The rated endurance is spread over them.",
        unit="years",
        least=0.1,
        most=50.0,
    )

    @property
    def endurance_bytes(self) -> float:
        """Writes to the store in its life, by the drive's rating; 0.0 if unknown."""
        return self.endurance_tbw * 1e12 or self.endurance_dwpd * self.capacity * RATED_YEARS * DAYS_PER_YEAR

    @property
    def daily_write_bytes(self) -> float:
        """The wear budget, bytes a day; 0.0: none."""
        return self.wear_budget or self.endurance_bytes / (self.endurance_years * DAYS_PER_YEAR)


@dataclass(frozen=True, config=_CLOSED)
class MoverConfig:
    """Transfers between tiers."""

    transfer_limit: int = _key(
        1024,
        "Transfers in flight on each link between two tiers. Others queue, demand first.",
        unit="transfers",
        least=1,
        most=65536,
    )
    queue_time: Seconds = _key(
        "2 s",
        "Reads from a far tier that would wait longer, or longer than half of their deadline, are "
        "refused with a hint. One session and prefetches get half of the queue each.",
        unit="seconds",
        least=0.001,
    )
    queue_blocks: int = _key(
        16384, "Blocks that may queue for reads from one far tier.", unit="blocks", least=1, most=10**7
    )
    batch_blocks: int = _key(
        128, "Blocks in one read or write of a tier, 32 MiB at most.", unit="blocks", least=1, most=4096
    )
    hash_threads: int = _key(2, "Threads that hash, verify and copy blocks.", unit="threads", least=1, most=256)
    prefetch_on_lookup: bool = _key(True, "A Lookup without an intent starts to load the far blocks that it finds.")
    prefetch_share: float = _key(0.5, "Most of a link, and of a tier for blocks not used yet.", least=0, most=1)


@dataclass(frozen=True, config=_CLOSED)
class ScrubConfig:
    """The background check of all held pages, and the handling of bad ones."""

    period: Seconds = _key(
        "24 h",
        "Every block is verified once per period. 0: only on `tierctl scrub`.",
        unit="seconds",
    )
    bandwidth: Rate = _key(
        "100 MiB/s",
        "Limit over all tiers. If a pass takes longer than the period, the daemon logs it once.",
        unit="bytes per second",
        least=PAGE_ALIGN_BYTES,
    )
    quarantine_share: float = _key(
        0.05,
        "Share of each tier that quarantined pages may take. Above it the oldest are used again. "
        "A restart empties the quarantine.",
        unit="share of capacity",
        least=0.0,
        most=0.5,
    )


@dataclass(frozen=True, config=_CLOSED)
class EventsConfig:
    """KV events tell routers where blocks lie. Any subscriber learns every tenant's tokens."""

    enabled: bool = _key(False, "Publish events. Needs pyzmq: pip install 'tierd[events]'.", unit="")
    bind: str = _key(
        "tcp://127.0.0.1:5557",
        "Address for subscribers: tcp://host:port, or ipc://path, whose file only its owner can open. "
        "Neither encrypted nor authenticated.",
        unit="address",
    )
    replay_bind: str = _key(
        "tcp://127.0.0.1:5558", "Address for replays of missed messages. Empty: none.", unit="address"
    )
    topic: str = _key("", 'First frame of each message. llm-d wants "kv@<pod>@<model>".', unit="text")
    format: Literal["map", "array"] = _key(
        "map", 'Format of an event: as vLLM writes it now ("map"), or as it did ("array").'
    )
    hashes: Literal["int", "bytes"] = _key(
        "int", "A block's hash: the last eight bytes of the engine's hash as an integer, or all bytes."
    )
    buffer: int = _key(
        10000,
        "Messages kept for replays, 64 MiB at most.",
        unit="messages",
        least=1,
        most=10**6,
    )
    blocks: int = _key(
        262144,
        "Blocks that routers know at one time, about 1 KiB of memory each. Above it the daemon reports "
        "the oldest as removed, although it still has them.",
        unit="blocks",
        least=1,
        most=10**7,
    )


@dataclass(frozen=True, config=_CLOSED)
class Config:
    """All settings. The tiers of one kind are indexed in the order in which they are written."""

    server: ServerConfig = Field(default_factory=ServerConfig)
    identity: IdentityConfig = Field(default_factory=IdentityConfig)
    device: tuple[DeviceConfig, ...] = Field(default=())
    host: tuple[HostConfig, ...] = Field(default_factory=lambda: (HostConfig(),))
    nvme: tuple[NvmeConfig, ...] = Field(default_factory=lambda: (NvmeConfig(),))
    mover: MoverConfig = Field(default_factory=MoverConfig)
    scrub: ScrubConfig = Field(default_factory=ScrubConfig)
    events: EventsConfig = Field(default_factory=EventsConfig)


SECTIONS: Mapping[str, type] = {
    "server": ServerConfig,
    "identity": IdentityConfig,
    "device": DeviceConfig,
    "host": HostConfig,
    "nvme": NvmeConfig,
    "mover": MoverConfig,
    "scrub": ScrubConfig,
    "events": EventsConfig,
}
"""TOML table -> the settings in it."""

TIER_SECTIONS = ("device", "host", "nvme")
"""Those of SECTIONS that are arrays of tables."""
