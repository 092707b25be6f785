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
        "What is in use above this share of the capacity, coldest first, is always to be held by a farther tier too: it is"
        " written there ahead of need, and stays here until its room is wanted.",
        unit="share of capacity",
        least=0.0,
        most=1.0,
    )


def _low_watermark() -> Any:
    return _key(
        0.70, "Once writing ahead has begun, it goes on to this share.", unit="share of capacity", least=0.0, most=1.0
    )


def _headroom() -> Any:
    return _key(
        0.0,
        "Share of the capacity that is kept free for requests in progress: between requests the coldest leave until it is. What a request brings"
        " then displaces nothing that is worth more.",
        unit="share of capacity",
        least=0.0,
        most=0.9,
    )


def _segment() -> Any:
    return _key(
        "auto",
        "Size of a segment, the amount of memory that moves between size classes, trust domains and writers. It must divide the"
        ' capacity. "auto": about a 32nd of the capacity, a power of two from 1 MiB to 1 GiB, 16 MiB or more where eight of them'
        " fit; the capacity is then rounded down to whole segments.",
        unit="bytes",
    )


def _eviction() -> Any:
    return _key(
        "reuse-index",
        "Policy that chooses which blocks leave. tierd/policies/README.md names them, with their figures.",
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
        "Directory of what outlives a restart. Empty: TIERD_STATE_DIR, else $XDG_STATE_HOME/tierd, else /var/lib/tierd, else"
        " ~/.local/state/tierd.",
        unit="path",
    )
    session_limit: int = _key(
        256, "Sessions open at one time; the next one is refused.", unit="sessions", least=1, most=65536
    )
    queue_limit: int = _key(
        256, "Calls in progress at one time; the next one is refused.", unit="calls", least=1, most=65536
    )
    session_credits: int = _key(
        64,
        "Calls that one session may have in progress, at most half of queue_limit; the hello tells its client. Beyond"
        " them calls are refused, and a client that goes on is cut off.",
        unit="calls",
        least=1,
        most=65536,
    )
    max_batch_blocks: int = _key(
        65536,
        "Blocks in one call, ranks counted; more are refused. The default is a million tokens in blocks of 16.",
        unit="blocks",
        least=1,
        most=100_000,
    )
    call_timeout: Seconds = _key("30 s", "Deadline of a call that brings none of its own.", unit="seconds", least=0.001)
    shutdown_deadline: Seconds = _key(
        "10 s",
        "Time that calls and transfers get to finish at shutdown; then they are cancelled.",
        unit="seconds",
        least=0.0,
    )
    loop_warning: Seconds = _key(
        "1 s",
        "The event loop has not turned for so long: what every thread does is written to the log.",
        unit="seconds",
        least=0.1,
    )
    loop_limit: Seconds = _key(
        "30 s",
        "The event loop has not turned for so long: the daemon ends, so that its supervisor starts it again, warm.",
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
        'Where time comes from. "replay": from the requests, and background work runs only in a Quiesce call, so that a recorded'
        " trace gives the same answers every time.",
    )
    tcp_listen: str = _key(
        "",
        "host:port for clients that share no memory; loopback only, needs tcp_credential_file. Empty: off.",
        unit="address",
    )
    tcp_credential_file: str = _key(
        "", "File with the bearer credential that every call over TCP must bring.", unit="path"
    )
    metrics_listen: str = _key("", "host:port of /metrics for Prometheus; loopback only. Empty: off.", unit="address")
    log_format: Literal["console", "json"] = _key("console", "Log lines for people, or one JSON object a line.")
    log_level: Literal["debug", "info", "warning", "error"] = _key("info", "The least level that is written.")
    watch_queue_events: int = _key(
        10000,
        "Events kept for a slow watcher; beyond that they are dropped and the watcher is told.",
        unit="events",
        least=1,
        most=10**7,
    )


@dataclass(frozen=True, config=_CLOSED)
class IdentityConfig:
    """The identity of clients. The tenant comes from here, never from a request."""

    tenants: dict[int, str] = Field(
        default_factory=dict,
        description='Tenant of a uid, such as { "1000" = "search" }. A uid that is not listed is a tenant of its own, uid-<number>.',
        json_schema_extra={"unit": "uid to name"},
    )
    credential_file: str = _key(
        "",
        "File with one `tenant credential` a line, for containers in which every client has the same uid. Empty: only uids count.",
        unit="path",
    )


@dataclass(frozen=True, config=_CLOSED)
class DeviceConfig:
    """Pages that attention kernels read in place. None unless configured."""

    kind: Literal["cpu", "cuda"] = _key(
        "cpu",
        'What the pages are made of. "cuda": memory of an NVIDIA GPU, set aside at start; needs a driver, a host tier and pip install'
        ' "tierd[gpu]". "cpu": host memory that stands in for it.',
    )
    ordinal: int = _key(
        0,
        "Of kind cuda: number of the GPU, as the driver counts those that the daemon sees.",
        unit="number",
        least=0,
        most=1023,
    )
    hang_limit: Seconds = _key(
        "10 s",
        "Of kind cuda: a call to the GPU that takes longer hangs: the daemon's GPU process is ended and another one started.",
        unit="seconds",
        least=0.1,
    )
    direct_reads: Literal["auto", "off"] = _key(
        "auto",
        'Of kind cuda: "auto" reads blocks from a store into the GPU past host memory (GPUDirect Storage) where a read at the start shows that it is direct.'
        ' "off": always by way of host memory.',
    )
    capacity: Bytes = _key("256 MiB", "Memory of the tier.", unit="bytes", least=PAGE_ALIGN_BYTES)
    segment: SegmentSize = _segment()
    arena_dir: str = _key(
        "", "Directory of the segments, as of a host tier. Empty: beside the host tiers'.", unit="path"
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
        "When a block that its writer could have changed since the commit is checked again. first_hit: before anybody else first"
        " sees it; sampled: at a share of later hits too; always: at every hit.",
    )
    sealed_puts: bool = _key(
        False,
        "For writers not to be trusted: they write to pages of their own, and Commit copies what is there to where no client may write and hashes the copy."
        " A put takes twice its room until then, and Commit a copy longer; the first hit verifies nothing again.",
    )
    release_on_exit: bool = _key(False, "Free the memory at shutdown, so that the next start is cold.")
    high_watermark: float = _high_watermark()
    low_watermark: float = _low_watermark()
    headroom: float = _headroom()
    eviction: str = _eviction()


@dataclass(frozen=True, config=_CLOSED)
class NvmeConfig:
    """A store on a disk."""

    path: str = _key("", "Directory of the store. Empty: nvme-<index> in server.state_dir.", unit="path")
    capacity: Bytes = _key(
        "4 GiB", "Disk space of the store, set aside up front.", unit="bytes", least=PAGE_ALIGN_BYTES
    )
    segment: SegmentSize = _segment()
    direct: Literal["auto", "on", "off"] = _key(
        "auto",
        'O_DIRECT, past the page cache. "auto": where the file system takes it, else buffered, and said so; "on": or fail.',
    )
    queue_depth: int = _key(
        16,
        "Reads at the disk at one time, and as many writes; half as many writes while there are reads.",
        unit="requests",
        least=1,
        most=1024,
    )
    zero_ahead: bool = _key(
        True,
        "Space that was set aside and never written is written over with zeros once, while the disk has nothing else to do: the first"
        " blocks in it would take twice as long. Not where what is written is limited (wear_budget, endurance).",
    )
    fault_limit: int = _key(
        8,
        "So many failed reads, failed writes or corrupt blocks within fault_window take the store out of service for writes; so many"
        " failed reads in a row, for reads too. A sync that fails does at once. 0: they never do.",
        unit="faults",
        least=0,
        most=10**6,
    )
    fault_window: Seconds = _key("10 min", "See fault_limit.", unit="seconds", least=1.0)
    hang_limit: Seconds = _key(
        "5 s",
        "A read, write or sync that takes longer hangs: the store is out of service until it has come back.",
        unit="seconds",
        least=0.1,
    )
    retry_pause: Seconds = _key(
        "0.5 s",
        "For so long a store stays out of service before it is tried again; doubled each time that it fails.",
        unit="seconds",
        least=0.01,
    )
    retry_pause_limit: Seconds = _key("2 s", "The longest of these pauses.", unit="seconds", least=0.01)
    high_watermark: float = _high_watermark()
    low_watermark: float = _low_watermark()
    headroom: float = _headroom()
    eviction: str = _eviction()
    admission: Literal["learned", "all", "second-touch", "tinylfu"] = _key(
        "learned",
        "Which blocks that leave memory are worth a write. learned: those that are likely to be used again, as likely as the wear budget affords;"
        " all; second-touch: used twice; tinylfu: used often lately. Short last blocks never are; a durable put is always written.",
    )
    wear_budget: Bytes = _key(
        0,
        "Bytes of blocks that may be written in a day, saved up for wear_burst. 0: what endurance_dwpd or endurance_tbw comes to, else no limit.",
        unit="bytes per day",
        most=10**18,
    )
    wear_burst: Seconds = _key(
        "6 h", "For so long the budget that was not used is saved.", unit="seconds", least=1.0, most=7 * 86400.0
    )
    endurance_dwpd: float = _key(
        0.0,
        "Rated endurance of the drive in drive writes per day over five years, as its data sheet says; of the store's capacity. 0: not known.",
        unit="drive writes per day",
        least=0.0,
        most=1000.0,
    )
    endurance_tbw: float = _key(
        0.0,
        "Rated endurance in terabytes written; of a drive that others write to as well, the store's part. 0: not known.",
        unit="TB",
        least=0.0,
        most=10.0**6,
    )
    endurance_years: float = _key(
        5.0,
        "For so long the drive is to last; the rated endurance is spread over it.",
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
        "Transfers in flight at one time on each link between two tiers, in as many batches as go into it, one at least; the others queue, demand first.",
        unit="transfers",
        least=1,
        most=65536,
    )
    queue_time: Seconds = _key(
        "2 s",
        "Reads from a far tier that would wait longer than this, or than half of their caller's deadline, are refused with a hint; a"
        " session gets half of the queue, prefetches too.",
        unit="seconds",
        least=0.001,
    )
    queue_blocks: int = _key(
        16384, "Blocks that may wait to be read from one far tier.", unit="blocks", least=1, most=10**7
    )
    batch_blocks: int = _key(
        128, "Blocks handed to a tier in one read or write, 32 MiB at most.", unit="blocks", least=1, most=4096
    )
    hash_threads: int = _key(2, "Threads that hash, verify and copy blocks.", unit="threads", least=1, most=256)
    prefetch_on_lookup: bool = _key(True, "Begin to bring near what a Lookup finds far away.")


@dataclass(frozen=True, config=_CLOSED)
class ScrubConfig:
    """The background check of all held pages, and the handling of bad ones."""

    period: Seconds = _key(
        "24 h",
        "Each block in each tier is read and verified once in so long. 0: only on `tierctl scrub`.",
        unit="seconds",
    )
    bandwidth: Rate = _key(
        "100 MiB/s",
        "Never more than this, over all tiers; a pass over more than fits takes longer than the period, and that is said once.",
        unit="bytes per second",
        least=PAGE_ALIGN_BYTES,
    )
    quarantine_share: float = _key(
        0.05,
        "Share of each tier that pages found bad may take instead of being used again; beyond it the oldest are. A restart uses all of them again.",
        unit="share of capacity",
        least=0.0,
        most=0.5,
    )


@dataclass(frozen=True, config=_CLOSED)
class EventsConfig:
    """KV events tell routers where blocks lie. Any subscriber learns every tenant's tokens."""

    enabled: bool = _key(False, "Publish them. Needs pyzmq: pip install 'tierd[events]'.", unit="")
    bind: str = _key(
        "tcp://127.0.0.1:5557",
        "Where subscribers connect: tcp://host:port, or ipc://path, whose file only its owner can open. Nothing is encrypted and nobody is asked who he is.",
        unit="address",
    )
    replay_bind: str = _key(
        "tcp://127.0.0.1:5558", "Where they ask for messages that they have missed. Empty: nowhere.", unit="address"
    )
    topic: str = _key("", 'First frame of each message; llm-d wants "kv@<pod>@<model>".', unit="text")
    format: Literal["map", "array"] = _key("map", 'How an event is written: as vLLM does now, or as it did ("array").')
    hashes: Literal["int", "bytes"] = _key(
        "int", "A block's hash: the last eight bytes of the engine's as an integer, or all of them."
    )
    buffer: int = _key(
        10000,
        "Messages kept for replays, 64 MiB of them at most.",
        unit="messages",
        least=1,
        most=10**6,
    )
    blocks: int = _key(
        262144,
        "Blocks that routers know of at one time, about 1 KiB of memory each; beyond it the oldest are told as removed, though they are held.",
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
