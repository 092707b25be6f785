"""Policies of simulated tiers, by the names that people write.

`lru`, `default`, `clairvoyant`, `host:lru+nvme:lfu` become one name for each tier. Every name
accepted here can be made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tierd.core.formats.model import TierKind, TierSpec
from tierd.policies.eviction import EVICTION
from tierd.simulator.rivals import RIVALS

DEFAULT = "default"
"""The policy of the daemon's settings."""
CLAIRVOYANT = "clairvoyant"
"""Knows the future; only in a simulation."""
KINDS = {"device": TierKind.DEVICE, "host": TierKind.HOST, "nvme": TierKind.NVME}


@dataclass(frozen=True, slots=True)
class Choice:
    """The policy of each tier. text: as written; everywhere: for tiers that by_kind does not
    name."""

    text: str
    everywhere: str = DEFAULT
    by_kind: Mapping[TierKind, str] = field(default_factory=dict)

    def applied(self, specs: Iterable[TierSpec]) -> tuple[TierSpec, ...]:
        """The tiers with these policies; `default` keeps that of their settings."""
        return tuple(self._applied(spec) for spec in specs)

    def _applied(self, spec: TierSpec) -> TierSpec:
        name = self.by_kind.get(spec.kind, self.everywhere)
        return spec if name == DEFAULT else dataclasses.replace(spec, eviction=name)


def names() -> list[str]:
    """Every name that a tier's policy may have."""
    return [DEFAULT, CLAIRVOYANT, *sorted({**EVICTION, **RIVALS})]


def parse_choice(text: str) -> Choice:
    """A choice of policies as people write it. Raises ValueError with fault, value and remedy."""
    text = text.strip()
    if ":" not in text:
        return Choice(text, everywhere=_known(text))
    by_kind = {}
    for part in text.split("+"):
        kind, _, name = part.partition(":")
        if kind.strip() not in KINDS or KINDS[kind.strip()] in by_kind:
            raise ValueError(f"{text!r}: {kind!r} is no kind of tier, or is there twice; write host:lru+nvme:lfu")
        by_kind[KINDS[kind.strip()]] = _known(name.strip())
    return Choice(text, by_kind=by_kind)


def _known(name: str) -> str:
    if name not in names():
        raise ValueError(f"{name!r} is no policy; use one of {', '.join(names())}")
    return name
