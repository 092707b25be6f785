"""Known blocks by name, as columns over dense ids.

Names map to ids and the facts of a block (size, chain, digest, use); index.py maps ids to pages.
The table finds a name by a key of 8 bytes and compares it in full. The key is a multilinear hash
with secret factors; its upper half is strongly universal (Lemire and Kaser, "Strongly universal
string hashing is fast", 2014). So names that a client made up collide no more often than others.

Life of an id: `add` (named, no page yet) -> pages come and go (index.py counts them in `places`) ->
`fade` when the last is gone.
A block without a page stays known while other blocks name it as their parent (`family`). So a
parent's name is kept once, and a chain mends when the block is written. Such a block has no parent,
so at most as many of them exist as blocks with pages. Lookups miss all blocks of a namespace after
`forget`. `unname` takes forgotten blocks out of the table, some at a time. An id lives until its
last page is gone.

The number of ids with parent b is `family[b]`. A free id is in no table, has no places and no
family. A block in the table is either named or forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.core.arrays.columns import MOST_ROWS, Columns, lengthen, rows_for
from tierd.core.arrays.sets import among, distinct, every, some, span, true_rows
from tierd.core.arrays.table import Table
from tierd.core.formats.meta import new_meta
from tierd.core.formats.model import HASH_BYTES, StructArray
from tierd.core.plan import Bytes, Ids
from tierd.core.plan_builder import no_ids

Column = NDArray[Any]
Words = NDArray[np.uint64]
"""Hashes as uint64 [n, 4]."""

ID_LIMIT = (1 << 31) - 1
"""Limit of block ids, which int32 columns hold; their rows would exhaust memory long before."""
ABOVE_LIMIT = 1 << 12
"""Most ancestors that a call follows. No tier gives up a block farther up before its descendants,
however cold it is (coldest.py)."""
STRIDE = 1 << 16
"""Rows of a few columns that fit the processor's caches."""
NAME = np.dtype([("namespace", "<u4"), ("hash", "u1", (HASH_BYTES,))])
"""The fields of META that name a block."""
_WORD = np.dtype("<u8")
_FOUR_TRUE = np.frombuffer(bytes([1] * 4), np.uint32)[0]
"""Four true comparisons, seen as one word."""
_META_COLUMNS = {
    "namespace": "namespace",
    "domain": "domain",
    "position": "position",
    "tokens": "tokens",
    "logical_length": "logical",
    "stored_length": "length",
    "epoch": "epoch",
    "slices": "slices",
    "codec": "codec",
    "codec_version": "codec_version",
    "time_ms": "time_ms",
    "priority": "priority",
    "until_s": "until_s",
}


def words(raw: Bytes) -> Words:
    """uint8 [n, 32] as uint64 [n, 4]; [n, 16] as [n, 2]."""
    return np.ascontiguousarray(raw).view(_WORD).reshape(len(raw), raw.shape[-1] // 8)


@dataclass(frozen=True, slots=True)
class Names:
    """Names of n blocks: namespace uint32 [n], hash uint64 [n, 4]. keys: table keys, uint64 [n], if
    already computed (`Blocks.keyed`)."""

    namespace: Column
    hash: Words
    keys: Column | None = None

    def at(self, rows: Ids) -> Names:
        """Some of them."""
        return Names(self.namespace[rows], self.hash[rows], None if self.keys is None else self.keys[rows])

    def firsts(self) -> NDArray[np.bool_]:
        """Which names occur in no earlier row."""
        out = np.ones(len(self.hash), bool)
        keys = self.hash[:, 0]
        ascending = np.sort(keys)
        if every(ascending[1:] != ascending[:-1]):  # the usual case; sorting costs much less than argsort
            return out
        order = keys.argsort()
        ascending = keys[order]
        again = true_rows(ascending[1:] == ascending[:-1])
        rows = np.unique(order[np.concatenate((again, again + 1))])
        seen: set[bytes] = set()
        for row in rows.tolist():
            name = self.hash[row].tobytes() + self.namespace[row].tobytes()
            out[row] = name not in seen
            seen.add(name)
        return out


def names_of(metas: StructArray) -> Names:
    """The names of META [n]."""
    return Names(metas["namespace"], words(metas["hash"]))


class Blocks:
    """See the module. Block ids index the columns, of equal length; index.py adds more."""

    def __init__(self, *, seed: int = 0, most: int = 0, unix_s: float = 0.0) -> None:
        """seed: of the keys; no answer depends on it. most: expected blocks. unix_s: at `now` 0."""
        self.most, self.unix_s = most, unix_s
        self._factors = np.random.SeedSequence(seed).generate_state(2 * HASH_BYTES // 8 + 1, np.uint64)
        self._columns = Columns(most)
        self.column = self._columns.column
        # Hashes, which lookups read at random, are in huge pages: lookups take less than half the
        # time.
        self.hash: Column = np.zeros((min(most, MOST_ROWS), 4), np.uint64)
        self.digest: Column = self.column(np.uint64, width=2)
        self.time_ms: Column = self.column(np.uint64)
        self.last_used: Column = self.column(np.float64)
        self.attention: Column = self.column(np.float32)
        self.namespace, self.domain = self.column(np.uint32), self.column(np.uint32)
        self.position, self.tokens = self.column(np.uint32), self.column(np.uint32)
        self.length, self.logical = self.column(np.uint32), self.column(np.uint32)
        self.epoch, self.hits = self.column(np.uint32), self.column(np.uint32)
        self.slices, self.codec = self.column(np.uint16), self.column(np.uint16)
        self.codec_version: Column = self.column(np.uint16)
        self.parent: Column = self.column(np.int32, fill=-1)
        self.family: Column = self.column(np.int32)
        self.places: Column = self.column(np.int32)
        self.named: Column = self.column(np.bool_)
        self.forgotten: Column = self.column(np.bool_)
        self.forgotten_count = 0
        self.pinned: Column = self.column(np.bool_)
        self.lax: Column = self.column(np.bool_)
        self.group: Column = self.column(np.uint16)
        self.declined: Column = self.column(np.uint8)
        self.priority: Column = self.column(np.uint8)
        self.until_s: Column = self.column(np.uint32)
        self.kept: Column = self.column(np.bool_)
        self.durable: Column = self.column(np.bool_)
        self.plain: Column = self.column(np.bool_)
        """An encoding did not fit its page: stores keep the block as it is."""
        self._free: Column = np.zeros(0, np.int32)  # not in the columns: as long as the most free ids so far
        self._free_count = 0
        self._rows = 0
        self._lax_namespaces: set[int] = set()
        self._lengthen(1)
        self.table = Table()

    @property
    def top(self) -> int:
        """Above every id in use."""
        return self._rows

    @property
    def count(self) -> int:
        """Named blocks that have a page."""
        return int(np.count_nonzero(self.named[: self._rows] & (self.places[: self._rows] > 0)))

    def find(self, names: Names) -> Ids:
        """The id with each name, else -1. It may have no page at the moment."""
        ids = self.table.find(self.keys_of(names), lambda rows, ids: self._same(names, rows, ids))
        return np.where(self.named.take(ids), ids, -1) if self.forgotten_count else ids

    def expect(self, count: int) -> None:
        """Prepares the table for so many more blocks, at a start."""
        self.table.expect(count)

    def add(self, metas: StructArray, now: float, *, known: Ids | None = None, names: Names | None = None) -> Ids:
        """Ids for distinct names: META [n]. Writes every column but parent (`link`), also of ids
        that had the name before. Those keep an operator's pin. known: the ids of names already
        looked up, -1 for new ones; names: those of the metas."""
        names = names or names_of(metas)
        ids = self.find(names) if known is None else known.copy()
        new = true_rows(ids < 0)
        fresh = self._new_ids(len(new))
        if len(new) == len(ids):
            ids, its = fresh, names
        else:
            ids[new], its = fresh, names.at(new)
        self.pinned[fresh] = False
        self._write(ids, metas, names, now)
        self.table.insert(fresh, self.keys_of(its))
        return ids

    def link(self, ids: Ids, parents: Bytes, now: float) -> Ids:
        """Links distinct blocks without a parent to the parents named, uint8 [n, 32] (zeros: none),
        known or not. Returns those linked."""
        hashes = words(parents)
        rows = true_rows((self.parent[ids] < 0) & (np.bitwise_or.reduce(hashes, axis=1) > 0))
        if not len(rows):
            return no_ids()
        prior, ids = ids[rows - 1], ids[rows]
        names = Names(self.namespace[ids], hashes[rows])
        found = self._before(prior, names)
        unknown = true_rows((found < 0) & names.firsts()) if some(found < 0) else no_ids()
        if len(unknown):
            blank = new_meta(len(unknown))
            blank["namespace"], blank["hash"] = names.namespace[unknown], parents[rows[unknown]]
            self.add(blank, now, known=np.full(len(unknown), -1, np.int64))
            found = self.find(names)
        kin = found != ids
        if not every(kin):
            ids, found = ids[kin], found[kin]
        self.parent[ids] = found
        np.add.at(self.family, found, 1)
        return ids

    def ancestors(self, ids: Ids) -> Ids:
        """Distinct ancestors of the blocks, nearest first, without these; ABOVE_LIMIT at most."""
        parents, seen, out = self.parent[ids], set(ids.tolist()), list[int]()
        parent = self.parent.data  # an element of it costs a third of an array's element
        for start in dict.fromkeys(parents[parents >= 0].tolist()):
            above = start
            while above >= 0 and above not in seen and len(out) < ABOVE_LIMIT:
                seen.add(above)
                out.append(above)
                above = parent[above]
        return np.asarray(out, np.int64)

    def upwards(self, start: int, limit: int) -> Ids:
        """The block (-1: none) and its ancestors, nearest first, at most `limit`."""
        parent, out = self.parent.data, list[int]()
        while start >= 0 and len(out) < limit:
            out.append(start)
            start = parent[start]
        return np.asarray(out, np.int64)

    def fade(self, ids: Ids) -> None:
        """Unlinks distinct ids without pages from their parents; frees ids that no block names."""
        parents = self.parent[ids].astype(np.int64)
        self.parent[ids] = -1
        parents = parents[parents >= 0]
        np.subtract.at(self.family, parents, 1)
        idle = distinct(np.concatenate((ids, parents)))
        self._erase(idle[(self.places[idle] == 0) & (self.family[idle] == 0)])

    def forget(self, namespaces: Ids) -> int:
        """Lookups miss these namespaces from now on. Returns how many blocks with pages were named.
        Their `unname` follows later."""
        is_theirs = np.zeros(int(namespaces.max(initial=0)) + 2, bool)
        is_theirs[namespaces] = True
        count = 0
        for at in range(0, self._rows, STRIDE):
            rows = slice(at, min(at + STRIDE, self._rows))
            those = self.named[rows] & is_theirs.take(
                self.namespace[rows], mode="clip"
            )  # the last entry stands for all greater ids
            if some(those):
                self.named[rows] ^= those
                self.forgotten[rows] |= those
                self.forgotten_count += int(np.count_nonzero(those))
                count += int(np.count_nonzero(those & (self.places[rows] > 0)))
        return count

    def unname(self, ids: Ids) -> None:
        """Takes distinct ids, named or forgotten, out of the table."""
        self.table.remove(ids, self.keys(ids))
        self.named[ids] = False
        if self.forgotten_count:
            self.forgotten_count -= int(np.count_nonzero(self.forgotten[ids]))
            self.forgotten[ids] = False

    def touch(self, ids: Ids, now: float) -> None:
        """The blocks were used."""
        self.hits[ids] += np.uint32(1)
        self.last_used[ids] = now
        self.declined[ids] = 0

    def relax(self, namespaces: set[int]) -> Ids:
        """Chains of these namespaces (windows, states) may lose heads. Returns ids changed."""
        new = namespaces - self._lax_namespaces
        if not new:
            return no_ids()
        self._lax_namespaces |= new
        ids = self.known()
        ids = ids[among(self.namespace[ids], list(new))]
        self.lax[ids] = True
        return ids

    def known(self) -> Ids:
        """Every id in use, ascending, with or without pages."""
        free = np.zeros(self._rows, bool)
        free[self._free[: self._free_count]] = True
        return true_rows(~free)

    def metas(self, ids: Ids) -> StructArray:
        """META [n] with a block's fields, without a page's."""
        out = new_meta(len(ids))
        for field, column in _META_COLUMNS.items():
            out[field] = getattr(self, column)[ids]
        out["hash"] = _raw(self.hash[ids])
        parents = self.parent[ids]
        out["parent"] = _raw(self.hash[parents])
        out["parent"][parents < 0] = 0
        out["digest"] = _raw(self.digest[ids])
        return out

    def names(self, ids: Ids) -> StructArray:
        """NAME [n]."""
        out = np.empty(len(ids), NAME)
        out["namespace"], out["hash"] = self.namespace[ids], _raw(self.hash.take(ids, axis=0))
        return out

    def keys(self, ids: Ids) -> Column:
        """The table keys of blocks: uint64 [n]."""
        return self.keys_of(Names(self.namespace[ids], self.hash.take(ids, axis=0)))

    def keyed(self, names: Names) -> Names:
        """The same names with their keys, for callers that need keys more than once."""
        return Names(names.namespace, names.hash, self.keys_of(names))

    def keys_of(self, names: Names) -> Column:
        """Table keys: uint64 [n], modulo 2^64."""
        if names.keys is not None:
            return names.keys
        halves = names.hash.view(np.uint32)
        keys = halves.astype(np.uint64) @ self._factors[1:] + names.namespace.astype(np.uint64) * self._factors[0]
        return np.asarray(keys, np.uint64)

    def _before(self, prior: Ids, names: Names) -> Ids:
        """Ids of the named parents. prior: ids to try first, usually the blocks before."""
        is_prior = self._same(names, np.arange(len(prior)), prior) & self.named[prior]
        if every(is_prior):
            return prior
        found = np.where(is_prior, prior, -1)
        rest = true_rows(~is_prior)
        found[rest] = self.find(names.at(rest))
        return found

    def _same(self, names: Names, rows: Ids, ids: Ids) -> NDArray[np.bool_]:
        alike = self.hash.take(ids, axis=0) == names.hash.take(rows, axis=0)
        same = (alike.view(np.uint32)[:, 0] == _FOUR_TRUE) & (self.namespace.take(ids) == names.namespace.take(rows))
        return np.asarray(same, np.bool_)

    def _write(self, ids: Ids, metas: StructArray, names: Names, now: float) -> None:
        at = span(ids)
        for field, column in _META_COLUMNS.items():
            getattr(self, column)[at] = metas[field]
        self.hash[at] = names.hash
        self.digest[at] = words(metas["digest"])
        self.named[at] = True
        self.hits[at] = 0
        self.attention[at] = 0
        self.group[at] = 0
        self.declined[at] = 0
        self.durable[at] = self.plain[at] = False
        self.last_used[at] = now
        self.lax[at] = among(metas["namespace"], list(self._lax_namespaces)) if self._lax_namespaces else False

    def _new_ids(self, count: int) -> Ids:
        reused = min(count, self._free_count)
        self._free_count -= reused
        old = self._free[self._free_count : self._free_count + reused][::-1].astype(np.int64)
        assert self._rows + count - reused <= ID_LIMIT, "more blocks than ids"
        self._lengthen(self._rows + count - reused)
        fresh = np.arange(self._rows, self._rows + count - reused)
        self._rows += count - reused
        return np.concatenate((old, fresh)) if len(fresh) else old

    def _erase(self, ids: Ids) -> None:
        is_in_table = self.named[ids] | self.forgotten[ids] if self.forgotten_count else self.named[ids]
        self.unname(ids[is_in_table])
        if self._free_count + len(ids) > len(self._free):
            lengthen(self._free, rows_for(len(self._free), self._free_count + len(ids)))
        self._free[self._free_count : self._free_count + len(ids)] = ids
        self._free_count += len(ids)

    def _lengthen(self, wanted: int) -> None:
        if wanted > self._columns.rows:
            self._columns.lengthen(rows_for(self._columns.rows, wanted))
        if self._columns.rows > len(self.hash):
            lengthen(self.hash, self._columns.rows)


def _raw(values: Words) -> Bytes:
    # The width is explicit: numpy cannot infer it from no rows.
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), values.shape[1] * values.itemsize)


def hash_rows(raw: bytes) -> Words:
    """One hash as uint64 [1, 4]."""
    return words(np.frombuffer(raw, np.uint8).reshape(1, HASH_BYTES))
