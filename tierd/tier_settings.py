"""Settings of the tiers, and what every setting is made of. `settings.py` has the other sections."""

from __future__ import annotations

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

CLOSED = ConfigDict(extra="forbid", validate_default=True)


def key(default: Any, meaning: str, *, unit: str = "", least: float | None = None, most: float | None = None) -> Any:
    """A setting: its default as written in TOML, meaning, unit and bounds (both inclusive)."""
    strict = True if isinstance(default, int | float) else None  # no "3" for 3, no 1 for true
    return Field(
        default=default, strict=strict, description=meaning, ge=least, le=most, json_schema_extra={"unit": unit}
    )


def live_key(default: Any, meaning: str, **more: Any) -> Any:
    """A `key` that a running daemon can change (`tierd/server/operators/live.py`)."""
    setting = key(default, meaning, **more)
    setting.json_schema_extra["live"] = True
    return setting


def _high_watermark() -> Any:
    return live_key(
        0.80,
        "Above this fill level the coldest blocks are copied to the next tier in the background. "
        "They stay here until space is needed.",
        unit="share of capacity",
        least=0.0,
        most=1.0,
    )


def _low_watermark() -> Any:
    return live_key(
        0.70, "Background copying continues down to this fill level.", unit="share of capacity", least=0.0, most=1.0
    )


def _headroom() -> Any:
    return live_key(
        0.0,
        "Share of the capacity that the daemon keeps free: between requests it evicts the coldest blocks. "
        "New blocks then displace nothing of more value.",
        unit="share of capacity",
        least=0.0,
        most=0.9,
    )


def _segment() -> Any:
    return key(
        "auto",
        "Size of a segment: memory moves between size classes, trust domains and writers in segments. "
        "It must divide the capacity. "
        '"auto": about 1/32 of the capacity, a power of two from 1 MiB to 1 GiB. '
        "If eight segments of 16 MiB fit, it is at least 16 MiB. "
        "The capacity is then rounded down to whole segments.",
        unit="bytes",
    )


def _eviction() -> Any:
    return live_key(
        "reuse-index",
        "Policy that chooses which blocks to evict. tierd/policies/README.md describes them.",
        unit="policy",
    )


@dataclass(frozen=True, config=CLOSED)
class DeviceConfig:
    """Pages that attention kernels read in place. None unless configured."""

    kind: Literal["cpu", "cuda"] = key(
        "cpu",
        'Memory of the pages. "cuda": memory of an NVIDIA GPU, allocated at start; needs a driver, a '
        'host tier and pip install "tierd[gpu]". "cpu": host memory in its place.',
    )
    ordinal: int = key(
        0,
        "Kind cuda: number of the GPU, as the driver counts those that the daemon sees.",
        unit="number",
        least=0,
        most=1023,
    )
    hang_limit: Seconds = key(
        "10 s",
        "Kind cuda: if a GPU call takes longer, the daemon kills its GPU process and starts another.",
        unit="seconds",
        least=0.1,
    )
    direct_reads: Literal["auto", "kvikio", "off"] = key(
        "auto",
        'Kind cuda: "auto" reads from a store straight into the GPU (GPUDirect Storage) if a test read '
        'at start is direct. "kvikio": so, by that package. "off": always through host memory.',
    )
    capacity: Bytes = key("256 MiB", "Memory of the tier.", unit="bytes", least=PAGE_ALIGN_BYTES)
    segment: SegmentSize = _segment()
    arena_dir: str = key(
        "", "Directory of the segments, as for a host tier. Empty: beside the host tiers.", unit="path"
    )
    high_watermark: float = _high_watermark()
    low_watermark: float = _low_watermark()
    headroom: float = _headroom()
    eviction: str = _eviction()


@dataclass(frozen=True, config=CLOSED)
class HostConfig:
    """Host memory, mapped by the clients."""

    capacity: Bytes = live_key("512 MiB", "Memory of the tier.", unit="bytes", least=PAGE_ALIGN_BYTES)
    segment: SegmentSize = _segment()
    arena_dir: str = key(
        "",
        "Directory of the segments, on a tmpfs (mounted with huge=always where it can be) or a hugetlbfs. Empty:"
        " /dev/shm/tierd-<uid>/<instance>.",
        unit="path",
    )
    verify: Literal["first_hit", "sampled", "always"] = key(
        "first_hit",
        "When views are verified, if a client could have changed the page since its commit. "
        "first_hit: before the first view of another client. sampled: some later views too. "
        "always: every view. Gets that copy always verify.",
    )
    sealed_puts: bool = key(
        False,
        "For untrusted writers. Commit copies their pages to pages that no client can write, and hashes "
        "the copy. A put then needs twice its space until its commit, and a copy longer.",
    )
    release_on_exit: bool = key(False, "Free the memory at shutdown. The next start is then cold.")
    high_watermark: float = _high_watermark()
    low_watermark: float = _low_watermark()
    headroom: float = _headroom()
    eviction: str = _eviction()


@dataclass(frozen=True, config=CLOSED)
class NvmeConfig:
    """A store on a disk."""

    path: str = key("", "Directory of the store. Empty: nvme-<index> in server.state_dir.", unit="path")
    capacity: Bytes = key("4 GiB", "Disk space of the store, allocated at start.", unit="bytes", least=PAGE_ALIGN_BYTES)
    segment: SegmentSize = _segment()
    direct: Literal["auto", "on", "off"] = key(
        "auto",
        'O_DIRECT, without the page cache. "auto": if the file system supports it, else buffered with a '
        'log line. "on": fail without it.',
    )
    level: int = key(
        1,
        "Stores get what those of the level before evict. 1: disks. 0: memory (a tmpfs), which is not durable.",
        unit="number",
        least=0,
        most=3,
    )
    codec: str = live_key(
        "",
        'Codec of the stored blocks, such as "lossless" or "rot-8-4"; `tierctl codecs` lists them. Empty: blocks stay '
        "as they are. A lossy one is used for namespaces whose clients accept an error.",
        unit="codec",
    )
    queue_depth: int = key(
        16,
        "Concurrent reads at the disk, and as many writes. Half as many writes during reads.",
        unit="requests",
        least=1,
        most=1024,
    )
    zero_ahead: bool = key(
        True,
        "Overwrite new space with zeros once, while the disk is idle: first writes take twice as long "
        "otherwise. Not done if writes are limited (wear_budget, endurance).",
    )
    fault_limit: int = live_key(
        8,
        "That many failed reads, failed writes or corrupt blocks within fault_window stop writes to the "
        "store. That many failed reads in a row stop reads too. 0: no such limit. "
        "A failed sync stops writes at once. After retry_pause they go on in a new file.",
        unit="faults",
        least=0,
        most=10**6,
    )
    fault_window: Seconds = live_key("10 min", "The window of fault_limit.", unit="seconds", least=1.0)
    hang_limit: Seconds = live_key(
        "5 s",
        "If a read, write or sync takes longer, the store is out of service until the call returns.",
        unit="seconds",
        least=0.1,
    )
    retry_pause: Seconds = live_key(
        "0.5 s", "Wait before retrying a failed store. Doubles after each failure.", unit="seconds", least=0.01
    )
    retry_pause_limit: Seconds = live_key("2 s", "The longest wait before a retry.", unit="seconds", least=0.01)
    high_watermark: float = _high_watermark()
    low_watermark: float = _low_watermark()
    headroom: float = _headroom()
    eviction: str = _eviction()
    admission: Literal["learned", "all", "second-touch", "tinylfu"] = live_key(
        "learned",
        "Which blocks are written to the store. learned: blocks likely to be used again, as the wear "
        "budget allows. all: every block. second-touch: blocks used twice. tinylfu: blocks used often. "
        "Short last blocks are never written, except by durable puts.",
    )
    wear_budget: Bytes = live_key(
        0,
        "Bytes of blocks written a day at most. Unused budget accumulates for wear_burst. "
        "0: from endurance_dwpd or endurance_tbw, else no limit.",
        unit="bytes per day",
        most=10**18,
    )
    wear_burst: Seconds = live_key(
        "6 h", "Unused write budget accumulates for this long.", unit="seconds", least=1.0, most=7 * 86400.0
    )
    endurance_dwpd: float = key(
        0.0,
        "Rated endurance in drive writes per day over five years, of the store's capacity. 0: unknown.",
        unit="drive writes per day",
        least=0.0,
        most=1000.0,
    )
    endurance_tbw: float = key(
        0.0,
        "Rated endurance in terabytes written; on a shared drive, the store's part. 0: unknown.",
        unit="TB",
        least=0.0,
        most=10.0**6,
    )
    endurance_years: float = key(
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
