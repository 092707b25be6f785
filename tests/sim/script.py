"""The events of a seed, written before the run, so that a failure can be shown in fewer events.

Purpose: `write` makes a `Script` of a seed: sizes, clients, and events in order of time.
Non-purpose: carrying them out (world.py). Invariants: an event's details follow from its own seed
alone, so omitting another does not change it. Every seed has a few kinds of fault and not all, so
that some of them do not mask others (swarm testing: Groce et al., ISSTA 2012).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

SECONDS = 30.0
"""Length of a script, in virtual time."""
EVENTS = 24
"""Mean number of verbs in a script."""

DEPTH = 8
"""Blocks of a chain, by default."""

BURST_PER_S = 500.0
"""Rate of the events in a burst: close enough to meet in one transfer."""

VERBS: Mapping[str, float] = {
    "get": 6,
    "copy": 8,
    "herd": 1,
    "put": 12,
    "lookup": 2,
    "prefetch": 2,
    "evict": 1,
    "flush": 1,
    "pin": 1,
    "unpin": 1,
    "bump": 0.7,
    "leave": 0.7,
}
"""Actions of clients and operators, by weight."""

BY_LAYER: Mapping[str, float] = {"get": 3, "herd": 8}
"""Factors for machines that get by layer: few gets find blocks in a store alone."""

FAULTS: Mapping[str, float] = {
    "crash": 1,
    "crash_at_point": 2,
    "power_loss": 1,
    "restart": 1,
    "client_dies": 2,
    "client_gives_up": 1,
    "client_stalls": 1,
    "client_scribbles": 2,
    "client_lies": 1,
    "words_are_lost": 1,
    "directory_errs": 1,
    "host_rots": 1,
    "memory_short": 1,
    "disk_slow": 1,
    "disk_hangs": 1,
    "read_fails": 1,
    "write_fails": 1,
    "sync_fails": 0.5,
    "disk_full": 0.5,
}
"""Faults that spare the synced bytes on the disk, by weight."""

PROCESS_FAULTS = {"crash", "crash_at_point", "power_loss", "restart", "client_dies", "client_stalls"}
"""Faults that end or stop a process and spare the tiers."""

MEDIUM_FAULTS: Mapping[str, float] = {
    "read_flips_bit": 1,
    "read_is_stale": 1,
    "read_is_misdirected": 1,
    "write_flips_bit": 1,
    "write_is_torn": 1,
    "write_is_lost": 1,
    "write_is_misdirected": 1,
}
"""Faults of a disk that lies, by weight. Blocks on it may be lost and must then be misses."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event. who: a client's number. seed: of its details."""

    at_s: float
    what: str
    who: int
    seed: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Sizes and settings. A segment has `depth` usual pages. in_order: share of asyncio's turns.
    memory_segments: of a store of level 0; 0: there is none. layers: of a block; 0: it is opaque.
    by_layer: share of gets that do not wait for whole blocks."""

    clients: int
    tenants: int
    device_segments: int
    host_segments: int
    nvme_segments: int
    block_bytes: int
    verify: str
    in_order: float
    prefetch_on_lookup: bool
    batch_blocks: int
    depth: int = DEPTH
    memory_segments: int = 0
    layers: int = 0
    by_layer: float = 0.0


@dataclass(frozen=True, slots=True)
class Script:
    """All events of a seed."""

    seed: int
    machine: Machine
    events: tuple[Event, ...]
    kinds: frozenset[str] = field(default_factory=frozenset)

    @property
    def is_calm(self) -> bool:
        """Whether no event could make a transfer fail, so that none may fail."""
        return self.kinds <= PROCESS_FAULTS and not any(event.what == "bump" for event in self.events)

    @property
    def medium_lies(self) -> bool:
        """Whether the disk may lose synced bytes."""
        return bool(self.kinds & MEDIUM_FAULTS.keys())


def write(seed: int, *, depth: int = DEPTH) -> Script:
    """The script of a seed. depth: blocks of a chain."""
    rng = random.Random(seed)
    machine = _with_layers(replace(_machine(rng), depth=depth), random.Random(f"layers {seed}"))
    kinds = _faults(rng)
    verbs = {name: weight * rng.choice((0.3, 1, 1, 2)) for name, weight in VERBS.items()}
    if machine.by_layer:
        verbs |= {name: verbs[name] * more for name, more in BY_LAYER.items()}
    total = rng.randint(EVENTS * 2 // 3, EVENTS * 4 // 3)
    names = rng.choices([*verbs], [*verbs.values()], k=total)
    names += [name for name in kinds for _ in range(rng.randint(1, 3))]
    bursts = [rng.uniform(0, SECONDS * 0.99) for _ in range(max(1, len(names) // rng.choice((1, 3, 6))))]
    times = (rng.choice(bursts) + min(rng.expovariate(BURST_PER_S), SECONDS * 0.01) for _ in names)
    events = [
        Event(at_s, name, rng.randrange(64), rng.getrandbits(32)) for at_s, name in zip(times, names, strict=True)
    ]
    events += _settings(random.Random(f"changed {seed}"))
    return Script(seed, machine, tuple(sorted(events, key=lambda event: event.at_s)), frozenset(kinds))


def _settings(rng: random.Random) -> list[Event]:
    """Changes of settings, in half of the seeds."""
    many = rng.choice((0, 0, 2, 6))
    return [Event(rng.uniform(0, SECONDS), "set", rng.randrange(64), rng.getrandbits(32)) for _ in range(many)]


def _machine(rng: random.Random) -> Machine:
    return Machine(
        clients=rng.randint(2, 5),
        tenants=rng.choice((1, 1, 2)),
        device_segments=rng.choice((0, 0, 6)),
        host_segments=rng.choice((8, 12, 16)),
        nvme_segments=rng.choice((6, 12, 24)),
        block_bytes=rng.choice((4096, 4096, 6000)),
        verify=rng.choice(("first_hit", "first_hit", "sampled", "always")),
        in_order=rng.choice((1.0, 0.7, 0.3, 0.0)),
        prefetch_on_lookup=rng.random() < 0.5,
        batch_blocks=rng.choice((1, 4, 64)),
        memory_segments=rng.choice((0, 0, 6)),
    )


def _with_layers(machine: Machine, rng: random.Random) -> Machine:
    """The machine, of which two in three get by layer, mostly blocks that have layers."""
    by_layer, layers = rng.choice((0.0, 0.4, 0.8)), rng.choice((0, 3, 4))
    if not by_layer or not layers or machine.depth > DEPTH:
        return replace(machine, by_layer=by_layer)
    return replace(machine, by_layer=by_layer, layers=layers, block_bytes=layers * rng.choice((4096, 6000)))


def _faults(rng: random.Random) -> list[str]:
    """A few kinds: about 15 % of seeds get faults of processes alone; 30 % of others a lying
    disk."""
    if rng.random() < 0.15:
        return [name for name in sorted(PROCESS_FAULTS) if rng.random() < 0.3]
    kinds = [name for name in FAULTS if rng.random() < 0.3]
    if rng.random() < 0.3:
        kinds += [name for name in MEDIUM_FAULTS if rng.random() < 0.5]
    return kinds
