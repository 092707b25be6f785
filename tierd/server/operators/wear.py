"""Wear: bytes written to each store, its remaining budget, and the expected life of its drive.

It counts writes and keeps the count across restarts. Counted are the bytes of slots, headers
included; the journal is less than a thousandth. `wear.jsonl` in the state directory is replaced
whole. A failed save is logged and harms nothing else. A crash loses at most SAVE_S of writes from
the count. `tierd.policies.admission` decides on writes.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog

from tierd._proto import admin_pb2 as pb
from tierd.core.admission import Balance
from tierd.core.plan import TierStats
from tierd.errors import CorruptRecord
from tierd.server.instance import sealed, unsealed
from tierd.tiers.drives.drives import Drive, drives_under
from tierd.tiers.io.durable import replace_file
from tierd.tiers.store.nvme import NvmeStore

if TYPE_CHECKING:
    from tierd.config import NvmeConfig
    from tierd.server.assembly import Assembly

log = structlog.get_logger(__name__)

FILE = "wear.jsonl"
SAVE_S = 15.0
RATE_SAMPLES = 240
"""The write rate is measured over an hour of samples."""
DAY_S = 86400


@dataclass(slots=True)
class Count:
    """One store's saved count. day: since 1970, UTC. level_bytes: of the wear budget."""

    written_bytes: int = 0
    day: int = 0
    day_bytes: int = 0
    level_bytes: float = 0.0


class Life(NamedTuple):
    """days: expected remaining life of a drive, None if unknown. basis: its source, or the reason."""

    days: float | None
    basis: str


@dataclass(slots=True)
class _Store:
    """One store. seen_bytes: counted in this run. samples: (wall seconds, bytes of this run)."""

    tier: NvmeStore
    table: NvmeConfig
    count: Count
    seen_bytes: int = 0
    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_SAMPLES))

    def advance(self, now_s: float) -> None:
        """Counts the bytes written since the last call. now_s: Unix time."""
        new, day = self.tier.written_bytes - self.seen_bytes, int(now_s // DAY_S)
        self.seen_bytes += new
        self.count.written_bytes += new
        self.count.day_bytes = new + (self.count.day_bytes if day == self.count.day else 0)
        self.count.day = day

    def rate(self, now_s: float) -> float:
        """Bytes per second, over the last hour or since the start."""
        first_s, first_bytes = self.samples[0] if self.samples else (now_s, self.seen_bytes)
        return (self.seen_bytes - first_bytes) / (now_s - first_s) if now_s > first_s else 0.0


class Wear:
    """The wear of all stores. Made before anything is written: budgets continue from the last run."""

    def __init__(self, daemon: Assembly) -> None:
        self._core, self._clock = daemon.cache.core, daemon.cache.clock
        self._path = Path(daemon.config.server.state_dir) / FILE
        self._task: asyncio.Task[None] | None = None
        kept = read_counts(self._path)
        stores = [tier for tier in daemon.tiers if isinstance(tier, NvmeStore)]
        tables = daemon.config.nvme
        self._stores = [_Store(t, tables[t.spec.index], kept.pop(t.place, Count())) for t in stores]
        self._others = kept
        for store in self._stores:
            level, now = store.count.level_bytes, self._clock.now()
            self._core.tuning.resume_wear(store.tier.position, level_bytes=level, now=now)

    def start(self) -> None:
        """Starts saving the count."""
        self._sample()
        self._task = asyncio.create_task(self._keep_for_ever())

    async def stop(self) -> None:
        """Saves a last time."""
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._keep()

    async def reply(self) -> pb.WearReply:
        """The wear of every store. It queries the drives, which may take some seconds."""
        found = [await asyncio.to_thread(drives_under, Path(store.tier.place)) for store in self._stores]
        now_s, stats = self._sample(keep=False), self._core.tier_stats()
        pairs = zip(self._stores, found, strict=True)
        return pb.WearReply(stores=[self._row(store, drives, stats, now_s) for store, drives in pairs])

    def _row(self, store: _Store, drives: Sequence[Drive], stats: Sequence[TierStats], now_s: float) -> pb.StoreWear:
        position, rate = store.tier.position, store.rate(now_s)
        life = life_of(drives, store.table, written_bytes=store.count.written_bytes, rate_bytes_per_s=rate)
        balance = self._core.tuning.wear_balance(position, self._clock.now())
        return pb.StoreWear(
            tier=store.tier.spec.name,
            path=store.tier.place,
            capacity_bytes=store.tier.spec.capacity_bytes,
            admission=store.tier.spec.admission,
            written_today_bytes=store.count.day_bytes,
            written_since_start_bytes=store.seen_bytes,
            written_bytes=store.count.written_bytes,
            write_bytes_per_s=rate,
            has_budget=balance.rate_bytes_per_s > 0,
            budget_bytes_per_day=balance.rate_bytes_per_s * DAY_S,
            budget_burst_bytes=balance.burst_bytes,
            budget_left_bytes=balance.level_bytes,
            declined=stats[position].declined,
            drives=[_drive(drive) for drive in drives],
            has_life=life.days is not None,
            life_days=life.days or 0.0,
            life_basis=life.basis,
        )

    def _sample(self, *, keep: bool = True) -> float:
        """Updates the counts. Returns the Unix time in seconds."""
        now_s = self._clock.wall_ms() / 1000
        for store in self._stores:
            store.advance(now_s)
            store.count.level_bytes = self._balance(store).level_bytes
            if keep:
                store.samples.append((now_s, store.seen_bytes))
        return now_s

    def _balance(self, store: _Store) -> Balance:
        return self._core.tuning.wear_balance(store.tier.position, self._clock.now())

    async def _keep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            await self._keep()

    async def _keep(self) -> None:
        self._sample()
        counts = {**self._others, **{store.tier.place: store.count for store in self._stores}}
        lines = [sealed(record) + b"\n" for record in records_of(counts)]
        try:
            await asyncio.to_thread(replace_file, self._path, lines)
        except OSError as error:
            log.warning("wear not saved", file=str(self._path), error=str(error))


def records_of(counts: Mapping[str, Count]) -> Iterator[bytes]:
    """One JSON record per store, with its directory."""
    for place, count in counts.items():
        yield json.dumps({"path": place, **asdict(count)}, separators=(",", ":")).encode()


def read_counts(path: Path) -> dict[str, Count]:
    """Counts of earlier runs, by directory. A damaged line is dropped and logged, and that store's
    count restarts."""
    counts: dict[str, Count] = {}
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return counts
    except OSError as error:
        log.warning("wear not loaded", file=str(path), error=str(error))
        return counts
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(unsealed(line))
            counts[str(record["path"])] = Count(**{f.name: record[f.name] for f in fields(Count)})
        except (CorruptRecord, ValueError, KeyError, TypeError) as error:
            log.warning("wear count dropped", file=str(path), line=number, error=str(error))
    return counts


def life_of(drives: Sequence[Drive], table: NvmeConfig, *, written_bytes: int, rate_bytes_per_s: float) -> Life:
    """The shortest life of the drives by their own percentages and hours. Else from the rated
    endurance and our rate."""
    lives = [life for drive in drives if (life := _own_life(drive)) is not None]
    if lives:
        return min(lives, key=lambda life: life.days or 0.0)
    if not table.endurance_bytes:
        return Life(None, "the drive reports no wear; set endurance_dwpd or endurance_tbw")
    if not rate_bytes_per_s:
        return Life(None, "nothing was written lately")
    left = max(0.0, table.endurance_bytes - written_bytes)
    return Life(
        left / rate_bytes_per_s / DAY_S, "the rated endurance, the bytes that tierd wrote, and the last hour's rate"
    )


def _own_life(drive: Drive) -> Life | None:
    smart = drive.smart
    if smart is None or not smart.percentage_used or not smart.power_on_hours:
        return None  # new, or its hours are unknown
    used = smart.percentage_used
    days = max(0, 100 - used) / used * smart.power_on_hours / 24
    return Life(days, f"the drive's own {used} % used in {smart.power_on_hours / 24:.0f} days of power")


def _drive(drive: Drive) -> pb.DriveInfo:
    info = pb.DriveInfo(
        device=drive.device,
        model=drive.model,
        capacity_bytes=drive.capacity_bytes,
        rotational=drive.rotational,
        trouble=drive.trouble,
    )
    if drive.smart is not None:
        info.has_health = True
        info.percentage_used = drive.smart.percentage_used
        info.written_bytes = drive.smart.written_bytes or 0
        info.power_on_hours = drive.smart.power_on_hours or 0
        info.warning = drive.smart.warning
    return info
