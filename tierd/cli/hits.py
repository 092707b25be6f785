"""The hit ratio: tokens that the daemon served, of all tokens that clients asked for.

Pure functions turn the daemon's counters into a line for people and values for scripts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rich.text import Text

from tierd.cli.figures import human_bytes, human_count, human_share
from tierd.cli.render import facts

HIT = re.compile(r'tierd_tokens_hit_total\{tier="([^"]*)"\}')
MISSED = "tierd_tokens_missed_total"


@dataclass(frozen=True, slots=True)
class Hits:
    """tiers: tokens by the nearest tier that held them. missed: tokens asked for and not served."""

    tiers: Mapping[str, int]
    missed: int

    @property
    def hit(self) -> int:
        """Tokens served by any tier."""
        return sum(self.tiers.values())

    @property
    def asked(self) -> int:
        """Tokens asked for."""
        return self.hit + self.missed

    def since(self, before: Hits) -> Hits:
        """The tokens since an older count; all of them if the daemon restarted in between."""
        if self.asked < before.asked:
            return self
        tiers = {name: max(0, count - before.tiers.get(name, 0)) for name, count in self.tiers.items()}
        return Hits(tiers, max(0, self.missed - before.missed))


def hits_of(counters: Mapping[str, int]) -> Hits:
    """The hits by a daemon's counters."""
    found = ((HIT.fullmatch(name), count) for name, count in counters.items())
    missed = sum(count for name, count in counters.items() if name.partition("{")[0] == MISSED)
    return Hits({match[1]: count for match, count in found if match}, missed)


def hits_line(hits: Hits, *, name: str = "hit ratio") -> Text:
    """`hit ratio 87.5 % of 8,192 tokens   host.0 75.0 %   nvme.0 12.5 %`."""
    if not hits.asked:
        return facts([(name, "- (no tokens asked for)")])
    share = f"{human_share(hits.hit, hits.asked)} of {human_count(hits.asked)} tokens"
    tiers = [(tier, human_share(count, hits.asked)) for tier, count in sorted(hits.tiers.items()) if count]
    return facts([(name, Text(share, style="bold")), *tiers])


PREFETCHED = re.compile(r'tierd_prefetched_bytes_total\{origin="[^"]*",outcome="([^"]*)"\}')


def prefetched_of(counters: Mapping[str, int]) -> dict[str, int]:
    """Bytes of prefetched blocks by outcome: used, wasted, dropped."""
    found = dict.fromkeys(("used", "wasted", "dropped"), 0)
    for name, count in counters.items():
        if match := PREFETCHED.fullmatch(name):
            found[match[1]] += count
    return found


def prefetch_line(counters: Mapping[str, int]) -> Text | None:
    """`prefetched   used 1.5 GiB   wasted 2 MiB (0.1 %)   dropped 0 B`. None: nothing was prefetched."""
    found = prefetched_of(counters)
    if not any(found.values()):
        return None
    share = human_share(found["wasted"], max(1, found["used"] + found["wasted"]))
    wasted = f"{human_bytes(found['wasted'])} ({share})"
    return facts(
        [
            ("prefetched used", human_bytes(found["used"])),
            ("wasted", wasted),
            ("dropped", human_bytes(found["dropped"])),
        ]
    )


def plain_hits(hits: Hits) -> dict[str, object]:
    """The same as plain values. The ratio is None if no tokens were asked for."""
    ratio = round(hits.hit / hits.asked, 6) if hits.asked else None
    return {"ratio": ratio, "tokens_hit": hits.hit, "tokens_asked": hits.asked, "tiers": dict(hits.tiers)}
