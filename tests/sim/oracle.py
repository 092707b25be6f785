"""What clients were told, and what must follow from it.

Purpose: the promises, as checks: every read is the committed bytes or a miss; what was acknowledged as durable is there again; pages that are pinned
do not change; after an epoch bump nothing old is served. Non-purpose: doing anything. Invariant: nothing here asks the daemon what it
thinks it holds, but for which of its blocks it let go, which its plans tell.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tierd.core.plan import Plan
from tierd.testing.content import content_of

Key = tuple[int, bytes]
"""Namespace id and block hash."""


@lru_cache(maxsize=4096)
def bytes_of(key: Key, length: int) -> bytes:
    """What a block must hold: it follows from namespace and hash, so a block of an old epoch shows under a new one."""
    name = hashlib.sha256(key[0].to_bytes(4, "little") + key[1]).digest()
    return content_of(name, length).tobytes()


@dataclass
class _Spoilt:
    """A page whose bytes somebody changed after the commit of key. seen_until: gets that begin before may see it, as it had been asked for before."""

    key: Key
    at_s: float
    seen_until: float


class Oracle:
    """One per simulation. now: virtual seconds. fail: a promise was broken."""

    def __init__(self, *, now: Callable[[], float], fail: Callable[[str], None], verify: str) -> None:
        self._now, self._fail, self._verify = now, fail, verify
        self.durable: set[Key] = set()
        """Acknowledged as durable, and neither let go since nor spoilt by its writer."""
        self.counts: Counter[str] = Counter()
        self._begun: set[Key] = set()
        self._asked: dict[Key, float] = {}  # first in this life
        self._spoilt: dict[int, _Spoilt] = {}
        self._ending: set[int] = set()  # namespaces
        self._over: dict[int, float] = {}  # those whose epoch is over in this life, and since when
        self._ended: dict[int, float] = {}  # those whose epoch is over in every life

    # -- what clients tell

    def commit_begins(self, keys: list[Key]) -> None:
        """From now on these blocks may be served."""
        self._begun.update(keys)

    def asks(self, keys: list[Key]) -> None:
        """A get of these blocks begins."""
        for key in keys:
            self._asked.setdefault(key, self._now())

    def hit(self, keys: list[Key], began_s: float) -> None:
        """A commit that began then found that these exist, and leased them: they were looked at as by a get, before what was changed since."""
        for key in keys:
            self._asked.setdefault(key, began_s)
        for spoilt in self._spoilt.values():
            if spoilt.key in keys and spoilt.at_s >= began_s:
                spoilt.seen_until = math.inf

    def acknowledged(self, key: Key) -> None:
        """A client was told that the block is durable."""
        self.counts["durable acknowledged"] += 1
        if key[0] not in self._ending:
            self.durable.add(key)

    def spoils(self, generation: int, key: Key) -> None:
        """Somebody changes bytes of a committed page: no copy made from it from now on can be relied on to be good."""
        self.durable.discard(key)
        self._spoilt[generation] = _Spoilt(key, self._now(), math.inf if key in self._asked else 0.0)

    def epoch_ends(self, namespaces: list[int]) -> None:
        """A bump begins: whatever becomes of it, nothing of them need come back."""
        self._ending.update(namespaces)
        self.durable = {key for key in self.durable if key[0] not in self._ending}

    def epoch_is_over(self, namespaces: list[int]) -> None:
        """In this life of the daemon, which begins to tell the next: nobody has been answered."""
        for namespace in namespaces:
            self._over.setdefault(namespace, self._now())

    def epoch_ended(self, namespaces: list[int]) -> None:
        """The bump was acknowledged."""
        for namespace in namespaces:
            self._ended.setdefault(namespace, self._now())

    def daemon_restarted(self) -> None:
        """A new life has verified nothing yet, and may not know of an end that nobody was told
        of."""
        self._asked.clear()
        self._over.clear()
        for spoilt in self._spoilt.values():
            spoilt.seen_until = min(spoilt.seen_until, self._now())

    def power_lost(self) -> None:
        """Memory is gone."""
        self._spoilt.clear()

    # -- what the daemon decided

    def saw(self, plan: Plan, nvme: int) -> None:
        """Blocks that it let go of on NVMe need not come back."""
        if not len(plan.freed):
            return
        gone = plan.freed[plan.freed["extent"]["tier"] == nvme]
        for namespace, block_hash in zip(gone["namespace"].tolist(), gone["hash"], strict=True):
            self.durable.discard((namespace, block_hash.tobytes()))

    # -- what is read

    def read(self, key: Key, found: bytes, *, generation: int, began_s: float) -> bool:
        """Checks a block that was served to a get which began then. Whether it is as committed."""
        self.counts["blocks read"] += 1
        if key not in self._begun:
            self._fail(f"{_named(key)}: served, and nobody has committed it")
        if self._is_late(key, began_s):
            self._fail(f"{_named(key)}: served to a get that began after its epoch had ended")
        if found == bytes_of(key, len(found)):
            return True
        spoilt = self._spoilt.get(generation)
        if spoilt is None:
            self._fail(f"{_named(key)}: wrong bytes, generation {generation}: {_difference(key, found)}")
        elif began_s > spoilt.at_s and (self._verify == "always" or began_s >= spoilt.seen_until):
            self._fail(f"{_named(key)}: bytes changed by a writer before the first hit, and served")
        else:
            self.counts["unguarded reads"] += 1
        return False

    def read_copy(
        self, key: Key, found: bytes, *, generation: int, began_s: float, looked_s: float | None = None
    ) -> None:
        """Checks a copy that was served, whose reader has summed it. looked_s: it was served whatever its sums,
        since the daemon had looked at the page for this get, which asked then."""
        self.counts["blocks copied"] += 1
        if key not in self._begun:
            self._fail(f"{_named(key)}: copied, and nobody has committed it")
        if self._is_late(key, began_s):
            self._fail(f"{_named(key)}: copied by a get that began after its epoch had ended")
        if found != bytes_of(key, len(found)):
            spoilt = self._spoilt.get(generation)
            if looked_s is None or spoilt is None or spoilt.at_s < looked_s:
                self._fail(f"{_named(key)}: wrong bytes in a copy, generation {generation}: {_difference(key, found)}")
            self.counts["unguarded reads"] += 1

    def _is_late(self, key: Key, began_s: float) -> bool:
        """Whether a get that began then came after its epoch."""
        return any(began_s > ends.get(key[0], began_s) for ends in (self._over, self._ended))


def _named(key: Key) -> str:
    return f"block {key[1].hex()[:8]} of namespace {key[0]}"


def _difference(key: Key, found: bytes) -> str:
    """Where it differs, and whether it is another block's content is left to whoever debugs."""
    a: NDArray[np.uint8] = np.frombuffer(found, np.uint8)
    b = np.frombuffer(bytes_of(key, len(found)), np.uint8)
    where = np.flatnonzero(a != b)
    return f"{len(where)} of {len(a)} bytes, the first at {where[0]}"
