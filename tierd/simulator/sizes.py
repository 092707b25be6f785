"""Sizes of simulated tiers as people write them (`64GiB`, `5%`, `817blocks`), and their tiers.

- Bytes give a tier as a daemon of that capacity makes it: segments, size classes for short blocks,
  slot headers, a session's share. A replay in lockstep against that daemon has the same hits.
- Blocks, or per cent of the distinct blocks rounded down, hold exactly so many blocks between
  requests; a short one counts as full. The current request has extra headroom, and one session may
  hold all. Published figures mean that.

The tiers of one run all follow one rule, because a block has one length in all of them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tierd.config import AUTO, Config, DeviceConfig, HostConfig, NvmeConfig, resolve
from tierd.core.formats.model import PAGE_ALIGN_BYTES, TierKind, TierSpec
from tierd.errors import InvalidArgument
from tierd.server.assembly import spec_of, specs_of
from tierd.simulator.sequences import Measure
from tierd.units import format_bytes, parse_bytes

KINDS = (TierKind.DEVICE, TierKind.HOST, TierKind.NVME)
"""Kinds of tiers that can be simulated, near to far."""
TABLES: Mapping[TierKind, type[DeviceConfig | HostConfig | NvmeConfig]] = {
    TierKind.DEVICE: DeviceConfig,
    TierKind.HOST: HostConfig,
    TierKind.NVME: NvmeConfig,
}
_COUNTED = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>%|blocks?)\s*")


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a tier. text: as written. One of the three is set: bytes, blocks, or a share of
    the distinct blocks."""

    text: str
    bytes: int | None = None
    blocks: int | None = None
    share: Fraction | None = None

    def count(self, distinct: int) -> int:
        """Blocks that it holds, for a trace with so many distinct ones; not for sizes in bytes."""
        return self.blocks if self.blocks is not None else math.floor((self.share or 0) * distinct)


Sizes = Mapping[TierKind, Size]
"""The tiers of one run."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """Tiers of a run. specs: near to far, with policies from the settings. texts: sizes as written;
    amounts: as numbers, bytes or a share of the distinct blocks."""

    specs: tuple[TierSpec, ...]
    texts: Mapping[TierKind, str]
    amounts: Mapping[TierKind, float]
    measure: Measure
    session_share: float


def parse_size(text: str) -> Size:
    """A size as people write it. Raises ValueError with fault, value and remedy."""
    match = _COUNTED.fullmatch(text)
    if match is None:
        return Size(text.strip(), bytes=_bytes_of(text))
    number, text = Fraction(match["number"]), text.strip()
    if match["unit"] == "%":
        if not 0 < number <= 100:
            raise ValueError(f"{text!r} is not above 0 and at most 100 % of the trace's distinct blocks")
        return Size(text, share=number / 100)
    if number.denominator != 1 or number < 1:
        raise ValueError(f"{text!r} is not a whole number of blocks, 1 or more")
    return Size(text, blocks=int(number))


def _bytes_of(text: str) -> int:
    stripped = text.strip()
    try:
        size = parse_bytes(int(stripped) if stripped.isdecimal() else stripped)
    except ValueError as error:
        raise ValueError(f"{error}; or a share of the trace's distinct blocks, 5%, or 817blocks") from error
    if size < PAGE_ALIGN_BYTES:
        raise ValueError(
            f"{text!r} is below {PAGE_ALIGN_BYTES} bytes, the smallest page; write for example 64GiB or 5%"
        )
    return size


def tiers_of(sizes: Sizes, *, distinct: int, longest: int, measure: Measure, config: Config) -> Tiers:
    """The tiers of these sizes; without sizes, the config's own. config: of the simulated daemon,
    as written. Raises InvalidArgument, ConfigError."""
    if not sizes:
        return _as_configured(config, measure)
    check_kinds(sizes)
    if all(size.bytes is not None for size in sizes.values()):
        texts = {kind: size.text for kind, size in sizes.items()}
        return _as_configured(_resized(config, sizes), measure, texts)
    if measure.encoding:
        raise InvalidArgument("simulate: --codec changes bytes, and sizes in blocks count none; give sizes in bytes")
    return _counted(sizes, distinct, longest, config)


def check_kinds(sizes: Sizes) -> None:
    """Raises InvalidArgument for combinations of tiers that no daemon has."""
    if TierKind.HOST not in sizes and (TierKind.NVME in sizes or TierKind.DEVICE not in sizes):
        raise InvalidArgument("simulate: an nvme tier needs a host tier to read into; add --host SIZE")
    in_bytes = {size.bytes is not None for size in sizes.values()}
    if len(in_bytes) > 1:
        texts = ", ".join(f"--{kind.name.lower()} {size.text}" for kind, size in sizes.items())
        raise InvalidArgument(f"simulate: {texts} mix bytes and blocks; give all in bytes, or all in % or blocks")


def _as_configured(config: Config, measure: Measure, texts: Mapping[TierKind, str] | None = None) -> Tiers:
    """Tiers as the daemon of this config makes them."""
    resolved = resolve(config)
    specs = tuple(spec for spec, _ in specs_of(resolved))
    if texts is None:
        texts = {kind: "+".join(format_bytes(s.capacity_bytes) for s in specs if s.kind is kind) for kind in KINDS}
    amounts = {kind: float(sum(s.capacity_bytes for s in specs if s.kind is kind)) for kind in KINDS if texts.get(kind)}
    return Tiers(specs, texts, amounts, measure, session_share=resolved.server.session_share)


def _resized(config: Config, sizes: Sizes) -> Config:
    """The config with one tier of each kind, otherwise as in its first table."""
    changed: dict[str, Any] = {kind.name.lower(): _tables(config, kind, sizes.get(kind)) for kind in KINDS}
    return dataclasses.replace(config, **changed)


def _tables(config: Config, kind: TierKind, size: Size | None) -> tuple[DeviceConfig | HostConfig | NvmeConfig, ...]:
    if size is None or size.bytes is None:
        return ()
    table = _first_table(config, kind)
    changed: dict[str, Any] = {"segment": "auto"} if table.segment == AUTO else {}
    return (dataclasses.replace(table, capacity=size.bytes, **changed),)


def _first_table(config: Config, kind: TierKind) -> DeviceConfig | HostConfig | NvmeConfig:
    written: Sequence[DeviceConfig | HostConfig | NvmeConfig] = getattr(config, kind.name.lower())
    return written[0] if written else TABLES[kind]()


def _counted(sizes: Sizes, distinct: int, longest: int, config: Config) -> Tiers:
    """Tiers that hold so many blocks of one page each between requests. One segment without a
    writer: every page fits every block."""
    specs = []
    for kind in (kind for kind in KINDS if kind in sizes):
        table, pages = _first_table(config, kind), sizes[kind].count(distinct)
        if not pages:
            raise InvalidArgument(
                f"--{kind.name.lower()} {sizes[kind].text}: less than one of {distinct} blocks; give more"
            )
        overhead = PAGE_ALIGN_BYTES if kind is TierKind.NVME else 0  # the header of a slot
        capacity, headroom = ((PAGE_ALIGN_BYTES + overhead) * count for count in (pages + longest, longest))
        specs.append(
            dataclasses.replace(
                spec_of(kind, 0, table),
                capacity_bytes=capacity,
                segment_bytes=capacity,
                headroom_bytes=headroom,
                writer_owned=False,
                wear_bytes_per_s=0.0,
            )
        )
    texts = {kind: size.text for kind, size in sizes.items()}
    amounts = {kind: size.count(distinct) / distinct for kind, size in sizes.items()}
    return Tiers(tuple(specs), texts, amounts, Measure(PAGE_ALIGN_BYTES, whole=True), session_share=1.0)
