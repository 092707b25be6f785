"""The answers that clients got, and the promises that follow from them.

Purpose: the promises, as checks. Every read is the committed bytes or a miss. Durable blocks come
back. Pinned pages do not change. After an epoch bump nothing old is served. Invariant: the oracle
asks the daemon for no state. Only its plans tell which blocks it drops.
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
    """A block's content follows from namespace and hash: a block of an old epoch shows."""
    name = hashlib.sha256(key[0].to_bytes(4, "little") + key[1]).digest()
    return content_of(name, length).tobytes()


@dataclass
class _Spoilt:
    """A page of key spoilt after its commit. seen_until: gets that begin before may still return
    it."""

    key: Key
    at_s: float
    seen_until: float


class Oracle:
    """One per simulation. now: virtual seconds. fail: reports a broken promise."""

    def __init__(self, *, now: Callable[[], float], fail: Callable[[str], None], verify: str) -> None:
        self._now, self._fail, self._verify = now, fail, verify
        self.durable: set[Key] = set()
        """Acknowledged as durable; since then neither dropped by the daemon nor spoilt."""
        self.counts: Counter[str] = Counter()
        self._begun: set[Key] = set()
        self._asked: dict[Key, float] = {}  # time of the first get in this life
        self._spoilt: dict[int, _Spoilt] = {}
        self._ending: set[int] = set()  # namespaces
        self._over: dict[int, float] = {}  # namespaces whose epoch is over in this life, with the time
        self._ended: dict[int, float] = {}  # namespaces whose epoch is over in every life, with the time

    # -- notes from clients

    def commit_begins(self, keys: list[Key]) -> None:
        """From now on the daemon may serve these blocks."""
        self._begun.update(keys)

    def asks(self, keys: list[Key]) -> None:
        """A get of these blocks begins."""
        for key in keys:
            self._asked.setdefault(key, self._now())

    def hit(self, keys: list[Key], began_s: float) -> None:
        """A commit that began at began_s leased these: verified as for a get, before later
        changes."""
        for key in keys:
            self._asked.setdefault(key, began_s)
        for spoilt in self._spoilt.values():
            if spoilt.key in keys and spoilt.at_s >= began_s:
                spoilt.seen_until = math.inf

    def acknowledged(self, key: Key) -> None:
        """A client got the answer that the block is durable."""
        self.counts["durable acknowledged"] += 1
        if key[0] not in self._ending:
            self.durable.add(key)

    def spoils(self, generation: int, key: Key) -> None:
        """Some process changes bytes of a committed page, so later copies of it may be bad."""
        self.durable.discard(key)
        self._spoilt[generation] = _Spoilt(key, self._now(), math.inf if key in self._asked else 0.0)

    def epoch_ends(self, namespaces: list[int]) -> None:
        """A bump begins: with any outcome, no block of these namespaces need come back."""
        self._ending.update(namespaces)
        self.durable = {key for key in self.durable if key[0] not in self._ending}

    def epoch_is_over(self, namespaces: list[int]) -> None:
        """The epoch is over in this life; no client has the answer, and the next is not kept
        yet."""
        for namespace in namespaces:
            self._over.setdefault(namespace, self._now())

    def epoch_ended(self, namespaces: list[int]) -> None:
        """The bump was acknowledged."""
        for namespace in namespaces:
            self._ended.setdefault(namespace, self._now())

    def daemon_restarted(self) -> None:
        """A new life has verified nothing yet. It may not know an epoch's end that no client was
        told."""
        self._asked.clear()
        self._over.clear()
        for spoilt in self._spoilt.values():
            spoilt.seen_until = min(spoilt.seen_until, self._now())

    def power_lost(self) -> None:
        """Memory is lost."""
        self._spoilt.clear()

    # -- the daemon's decisions

    def saw(self, plan: Plan, nvme: int) -> None:
        """Blocks that the plan frees on NVMe need not come back."""
        if not len(plan.freed):
            return
        gone = plan.freed[plan.freed["extent"]["tier"] == nvme]
        for namespace, block_hash in zip(gone["namespace"].tolist(), gone["hash"], strict=True):
            self.durable.discard((namespace, block_hash.tobytes()))

    # -- reads

    def read(self, key: Key, found: bytes, *, generation: int, began_s: float) -> bool:
        """Checks a block that a get served, which began at began_s. Whether it is as committed."""
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
        """Checks a copy that was served, and whose reader summed it.
        looked_s: the daemon verified the page for this get then, so the reader ignored the sums."""
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
        """Whether a get that began at began_s came after the end of the block's epoch."""
        return any(began_s > ends.get(key[0], began_s) for ends in (self._over, self._ended))


def _named(key: Key) -> str:
    return f"block {key[1].hex()[:8]} of namespace {key[0]}"


def _difference(key: Key, found: bytes) -> str:
    """The count and the first index of the bytes that differ."""
    a: NDArray[np.uint8] = np.frombuffer(found, np.uint8)
    b = np.frombuffer(bytes_of(key, len(found)), np.uint8)
    where = np.flatnonzero(a != b)
    return f"{len(where)} of {len(a)} bytes, the first at {where[0]}"
