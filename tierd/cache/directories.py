"""The directories of trust domains: blocks in mapped memory by name, for gets without a call
(`tierd.core.formats.directory`).

Each domain that has a session gets one directory, updated when blocks are published and freed. The
client reads it in tierd/client/blocks/one_sided_get.py. A directory names blocks of its own domain
only. A block is entered after its catalogue has it. Namespaces of ended epochs cannot be read.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

from tierd.core.arrays.sets import every, kinds, some
from tierd.core.formats.block import Namespace
from tierd.core.formats.directory import Directory, directory_bytes, keys_of, places_of
from tierd.core.formats.model import StructArray
from tierd.core.formats.words import words_of
from tierd.tiers.tier import Descriptor, Tier, is_mapped

BLOCK_BYTES = 64 << 10
"""Assumed block size when the directory is sized. Smaller blocks may not all fit."""
_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of Linux 5.1, missing in the module fcntl. It allows no new writable
mappings. Existing ones stay writable."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _FUTURE_WRITE | fcntl.F_SEAL_SEAL


class Directories:
    """Holds the directory of each domain. domains_of: maps namespace ids to their domains."""

    def __init__(self, tiers: Sequence[Tier], *, domains_of: Callable[[StructArray], StructArray]) -> None:
        self._domains_of = domains_of
        self._near = {tier.position for tier in tiers if is_mapped(tier)}
        self._bytes = directory_bytes(sum(tier.spec.capacity_bytes for tier in filter(is_mapped, tiers)) // BLOCK_BYTES)
        self._files: dict[int, int] = {}
        self._written: dict[int, Directory] = {}
        self._pending: list[Any] = []

    def give(self, domain: int) -> Descriptor:
        """A new read-only descriptor of a domain's directory. Raises OSError."""
        if domain not in self._files:
            file = os.memfd_create("tierd-directory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(file, self._bytes)
                memory = mmap.mmap(file, self._bytes)
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
            except BaseException:
                os.close(file)
                raise
            self._files[domain] = file
            self._written[domain] = Directory.new(words_of(memory, count=self._bytes // 8))
        return Descriptor(os.open(f"/proc/self/fd/{self._files[domain]}", os.O_RDONLY | os.O_CLOEXEC), self._bytes)

    def begin(self, namespace: Namespace, *, domain: int) -> None:
        """Allows gets without a call, after a session of the domain opened the namespace."""
        if domain in self._written:
            self._written[domain].note_runs(namespace.ids, runs=True)

    def end(self, namespace: Namespace) -> None:
        """Ends the namespace's epoch: later gets need a call."""
        for directory in self._written.values():
            directory.note_runs(namespace.ids, runs=False)

    def add(self, extents: StructArray, metas: StructArray) -> None:
        """Enters published blocks, EXTENT [n], META [n], before the put is answered. Blocks with an
        error are left out: a get without a call accepts exact blocks alone."""
        if self._written:
            self._enter()
            extents, metas = _exact(extents, metas)
            self._apply(Directory.add, extents, metas["namespace"], metas["hash"])

    def add_soon(self, extents: StructArray, metas: StructArray) -> None:
        """Enters blocks in the loop's next turn, if their client has them already."""
        if self._written:
            extents, metas = _exact(extents, metas)
            self._later(Directory.add, extents, metas["namespace"], metas["hash"])

    def remove(self, freed: StructArray) -> None:
        """Removes freed pages, FREED [n], in the loop's next turn."""
        if self._written and some(freed["was_ready"]):
            gone = freed[freed["was_ready"]]
            self._later(Directory.remove, gone["extent"], gone["namespace"], gone["hash"])

    def _later(self, *change: Any) -> None:
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._enter)
        self._pending.append(change)

    def _enter(self) -> None:
        pending, self._pending = self._pending, []
        for each in pending:
            self._apply(*each)

    def close(self) -> None:
        """Closes all directories. Existing mappings stay valid."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._written.clear()

    def _apply(
        self, verb: Callable[..., None], extents: StructArray, namespaces: StructArray, hashes: StructArray
    ) -> None:
        domains = self._domains_of(namespaces)
        for tier in kinds(extents["tier"]):
            for domain in kinds(domains) if tier in self._near else ():
                if domain in self._written:
                    rows = (domains == domain) & (extents["tier"] == tier)
                    its = extents[rows]
                    places = places_of(its["tier"], its["segment"], its["slot"])
                    verb(self._written[domain], keys_of(namespaces[rows], hashes[rows]), places)


def _exact(extents: StructArray, metas: StructArray) -> tuple[StructArray, StructArray]:
    """Those whose values have no error."""
    exact = metas["error"] == 0
    return (extents, metas) if every(exact) else (extents[exact], metas[exact])
