"""Why requests hit or missed, as messages of the Admin service.

It reads the record of decisions and the core's books, and changes nothing. A request is judged by
the books as they were then, as far as the record tells: later puts and evictions do not count.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierd._proto import admin_pb2 as pb
from tierd.cache.cache import Cache
from tierd.core.admission import Verdict
from tierd.core.arrays.sets import true_rows
from tierd.core.formats.model import HASH_BYTES, Reason, TierKind
from tierd.core.plan import Bytes, Ids
from tierd.decisions.causes import DECLINED, LOSSES, MEANINGS, Cause
from tierd.decisions.record import REQUEST_BYTES, Kind, Miss
from tierd.errors import InvalidArgument, NotFound
from tierd.server.grpc.messages import hashes_of

LAST_LIMIT = 1000
"""Requests in one answer."""
PIECE = 32
"""Requests or blocks that are explained before other calls run."""
MATCHES = 100
"""Blocks of one prefix in one answer."""
SHOWN_DIGITS = 12
"""Digits of a hash in a sentence."""
SESSION_DIGITS = 8
"""Digits of a session's number in a sentence, as in the tables of `tierctl`."""
RETRIED_S = 60.0
"""A read that failed found its page bad at most so long before."""
NEEDS = {
    Reason.DEMAND: "a get of block",
    Reason.PREFETCH: "a prefetch of block",
    Reason.DEMOTION: "block",
    Reason.DURABLE: "a durable put of block",
}
"""Why a transfer needed the room of an evicted block."""

Row = Any
"""One row of a structured array."""
Losses = Mapping[tuple[int, bytes], list[Row]]
"""Namespace and hash -> rows of LOSS, the newest first."""


@dataclass(frozen=True, slots=True)
class Sought:
    """A block that somebody looked for. at: the cache's time; inf: now. error_limit: of the request."""

    namespace: int
    hash: bytes
    at: float = math.inf
    error_limit: float = math.inf


class Explaining:
    """The verb on one cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache, self._core, self._record = cache, cache.core, cache.parts.decisions

    async def reply(self, request: pb.ExplainRequest) -> pb.ExplainReply:
        """Explains a prompt's blocks, one block, the requests of an id, or the latest ones. Raises
        InvalidArgument, NotFound."""
        reply = pb.ExplainReply(decisions=self._record.count, bytes=self._record.nbytes, since_s=self._record.age_s)
        if request.hashes:
            reply.blocks.extend(await self._prompt(request.namespace, hashes_of(request.hashes, "hashes")))
        elif request.block:
            reply.blocks.extend(await self._named(request.block))
        else:
            reply.requests.extend(await self._asked(request))
        return reply

    # -- blocks

    async def _prompt(self, namespace: int, hashes: Bytes) -> list[pb.Cause]:
        """One cause a block, of the first rank that lacks it."""
        ranks = self._cache.registry.get(namespace).ids
        its = np.full(len(hashes), ranks[0], np.int64)
        for rank in reversed(ranks):
            its[self._core.find_blocks(rank, hashes) < 0] = rank
        losses = self._losses(hashes)
        sought = [Sought(int(of), name.tobytes()) for of, name in zip(its, hashes, strict=True)]
        return [self._block(one, losses) async for one in _in_pieces(sought)]

    async def _named(self, prefix: str) -> list[pb.Cause]:
        """The blocks whose hash begins so: held, lost, or asked for in vain."""
        if set(prefix) - set("0123456789abcdef") or len(prefix) > 2 * HASH_BYTES:
            raise InvalidArgument(
                f"block {prefix!r:.80}: not 1 to 64 hexadecimal digits; copy it from `tierctl blocks`"
            )
        held, requests = list[Row](), self._record.requests.held
        for ids in self._core.pieces():
            held.extend(self._core.names(self._core.find_by_prefix(prefix, of=ids))[:MATCHES])
            if len(held) > MATCHES:
                break
            await asyncio.sleep(0)
        missed = requests[_begin_with(requests["missing"], prefix) & (requests["miss"] > 0)]
        lost = self._record.losses.held["freed"]
        lost = lost[_begin_with(lost["hash"], prefix)]
        found = {(int(row["namespace"]), row["hash"].tobytes()) for row in (*held, *lost)}
        found |= {(int(row["namespace"]), row["missing"].tobytes()) for row in missed}
        if not found:
            raise NotFound(f"block {prefix}: no tier holds it, and the record has neither its loss nor a get of it")
        if len({name for _, name in found}) > 1:
            raise InvalidArgument(f"block {prefix}: {len(found)} or more blocks begin with it; give more digits")
        sought = [Sought(namespace, name) for namespace, name in sorted(found)[:MATCHES]]
        losses = self._losses(np.frombuffer(sought[0].hash, np.uint8)[None])
        return [self._block(one, losses) for one in sought]

    def _block(self, sought: Sought, losses: Losses) -> pb.Cause:
        cause = self._held(sought) or self._lost(sought, losses) or self._unknown(sought)
        cause.hash, cause.namespace = sought.hash, sought.namespace
        return cause

    def _held(self, sought: Sought) -> pb.Cause | None:
        """The cause if a tier holds the block, and did so then."""
        block = self._core.find_blocks(sought.namespace, np.frombuffer(sought.hash, np.uint8)[None])
        if block[0] < 0 or not self._cache.registry.is_current(self._cache.registry.get(sought.namespace)):
            return None
        if float(self._core.metas(block)["time_ms"][0]) / 1000 > self._core.unix_s(sought.at):
            return None
        bits = int(self._core.tier_bits(block)[0])
        tiers = [tier for tier in self._cache.tiers if bits >> tier.position & 1]
        names = f"{' and '.join(tier.spec.name for tier in tiers)} hold{'s' if len(tiers) == 1 else ''} it"
        if not any(self._core.is_serving(tier.position) for tier in tiers):
            return _cause(Cause.OUT_OF_SERVICE, f"{names}, out of service.", tier=tiers[0].spec.name)
        errors = [float(self._core.errors(self._core.extents(block, tier=tier.position))[0]) for tier in tiers]
        if min(errors) > sought.error_limit:
            limit = f"{sought.error_limit:.3g}"
            text = f"{names} with an error of up to {min(errors):.3g}; the client accepts {limit}."
            facts = {"error": f"{min(errors):.3g}", "error_limit": limit}
            return _cause(Cause.TOO_COARSE, text, tier=tiers[0].spec.name, facts=facts)
        is_far = tiers[0].spec.kind is TierKind.NVME
        return _cause(Cause.HIT_FAR if is_far else Cause.HIT_NEAR, f"{names}.", tier=tiers[0].spec.name)

    def _lost(self, sought: Sought, losses: Losses) -> pb.Cause | None:
        """The cause if the record has the loss of the block."""
        rows = losses.get((sought.namespace, sought.hash), ())
        row = next((row for row in rows if row["time"] <= sought.at), None)
        return None if row is None else self._loss(row)

    def _unknown(self, sought: Sought) -> pb.Cause:
        """The cause if the record has nothing about the block."""
        namespace = self._cache.registry.get(sought.namespace)
        if not self._cache.registry.is_current(namespace):
            return _cause(Cause.EPOCH_BUMPED, f"Epoch {namespace.epoch} of this namespace has ended.")
        is_certain = sought.namespace not in self._record.former and self._record.losses.is_whole
        cause = Cause.NEVER_STORED if is_certain else Cause.BEFORE_RECORD
        text = MEANINGS[cause]
        if not is_certain:
            text += f" The record is {self._record.age_s:.3g} s long."
        if namespace.epoch > 1:
            text += f" An operator began epoch {namespace.epoch} of this namespace; blocks of earlier ones are misses."
        return _cause(cause, text, facts={"epoch": str(namespace.epoch)})

    def _loss(self, row: Row) -> pb.Cause:
        """A row of LOSS as a cause."""
        page, spec = row["freed"], self._cache.tiers[row["freed"]["extent"]["tier"]].spec
        cause, idle_s = LOSSES[Reason(page["reason"])], float(row["time"] - page["last_used"])
        text, facts = MEANINGS[cause], {"idle_s": f"{idle_s:.3f}"}
        if cause is Cause.EVICTED:
            policy = self._record.policy_at(float(row["time"]), tier=int(page["extent"]["tier"])) or spec.eviction
            facts |= {"policy": policy, "rank": str(page["rank"]), "candidates": str(page["candidates"])}
            text = f"{spec.name} evicted it, unused for {idle_s:.3g} s, by {policy}"
            if page["rank"]:
                text += f", rank {page['rank']:,} of {page['candidates']:,} candidates, the coldest first"
            else:
                text += " with all blocks of its segment"
            if row["session"] or row["wanted"].any():
                facts["preferred"] = row["wanted"].tobytes().hex() if row["wanted"].any() else ""
                facts["session"] = str(row["session"])
                text += f", for {_wanted(row)}"
            text += "."
            verdict = Verdict(page["declined"])
            if verdict in DECLINED:
                cause = Cause.NOT_ADMITTED
                facts["declined"] = verdict.name.lower()
                text += f" Admission had declined to write it to NVMe: {DECLINED[verdict]}."
        ago_s = self._cache.clock.now() - float(row["time"])
        return _cause(cause, text, ago_s=ago_s, tier=spec.name, facts=facts)

    def _losses(self, hashes: Bytes) -> Losses:
        """The losses of blocks with these hashes, uint8 [n, 32]."""
        ring, found = self._record.losses, dict[tuple[int, bytes], list[Row]]()
        rows = true_rows(np.isin(_heads(ring.held["freed"]["hash"]), _heads(hashes)))
        for row in ring.rows[ring.newest_first(rows)]:
            page = row["freed"]
            found.setdefault((int(page["namespace"]), page["hash"].tobytes()), []).append(row)
        return found

    # -- requests

    async def _asked(self, request: pb.ExplainRequest) -> list[pb.RequestDecision]:
        ring = self._record.requests
        wanted = np.ones(len(ring.held), bool)
        if request.request:
            names, name = ring.held["request"], request.request.encode()[:REQUEST_BYTES]
            is_its = names == name
            # vLLM adds a suffix to the id that its API shows.
            wanted &= is_its if is_its.any() else names.astype(f"S{len(name)}") == name
        if request.misses:
            wanted &= ring.held["miss"] > 0
        rows = ring.rows[ring.newest_first(true_rows(wanted))[: min(request.last or LAST_LIMIT, LAST_LIMIT)]]
        losses = self._losses(rows["missing"][rows["miss"] > 0]) if len(rows) else {}
        return [self._request(row, losses) async for row in _in_pieces(rows)]

    def _request(self, row: Row, losses: Losses) -> pb.RequestDecision:
        namespace = int(row["namespace"]) or self._namespace_of(row)
        tiers = {t.spec.name: int(n) for t, n in zip(self._cache.tiers, row["tiers"], strict=True) if n}
        return pb.RequestDecision(
            ago_s=self._cache.clock.now() - float(row["time"]),
            request=bytes(row["request"]).decode(errors="replace"),
            session=int(row["session"]),
            kind=Kind(row["kind"]).name.lower(),
            namespace=namespace,
            model=self._cache.registry.get(namespace).spec.model if namespace else "",
            tokens_asked=int(row["asked"]),
            tokens_missed=max(0, int(row["asked"]) - int(row["served"])),
            tier_tokens=tiers,
            waited_s=float(row["waited_s"]) if row["kind"] != Kind.COMPUTED else 0.0,
            cause=self._cause_of(row, losses),
            times=int(row["times"]),
        )

    def _cause_of(self, row: Row, losses: Losses) -> pb.Cause:
        miss = Miss(row["miss"])
        if miss is Miss.NONE:
            return self._hit(row)
        if miss is Miss.SLOWER:
            load, compute = (f"{1e3 * float(row[name]):.3g}" for name in ("waited_s", "compute_s"))
            text = f"Loading was expected to take {load} ms, computing {compute} ms, by the engine's own measurements."
            return _cause(Cause.SLOWER_THAN_COMPUTING, text, facts={"load_ms": load, "compute_ms": compute})
        sought = Sought(int(row["namespace"]), row["missing"].tobytes(), float(row["time"]), float(row["error_limit"]))
        if miss is Miss.ABSENT:
            return self._absent(sought, losses)
        cause = {Miss.BUSY: Cause.BUSY, Miss.NO_ROOM: Cause.NO_ROOM, Miss.FAILED: Cause.READ_FAILED}[miss]
        its = losses.get((sought.namespace, sought.hash), ())
        bad = (one for one in its if one["freed"]["reason"] == Reason.CORRUPTED)
        if miss is Miss.FAILED and any(0 <= sought.at - one["time"] < RETRIED_S for one in bad):
            cause = Cause.CORRUPT
        return pb.Cause(cause=cause, text=MEANINGS[cause], ago_s=-1, hash=sought.hash, namespace=sought.namespace)

    def _absent(self, sought: Sought, losses: Losses) -> pb.Cause:
        """The cause of a block that was not found. A namespace of several ranks misses if one of
        them lacks the block."""
        ranks = self._cache.registry.get(sought.namespace).ids
        its = [Sought(rank, sought.hash, sought.at, sought.error_limit) for rank in ranks]
        own = sorted(its, key=lambda one: one.namespace != sought.namespace)
        lacking = next((one for one in own if not self._serves(one)), own[0])
        cause = self._block(lacking, losses)
        if cause.cause in (Cause.HIT_NEAR, Cause.HIT_FAR):
            cause.cause, cause.text = Cause.OUT_OF_SERVICE, f"{cause.tier} holds it now, and did not serve it then."
        return cause

    def _serves(self, sought: Sought) -> bool:
        held = self._held(sought)
        return held is not None and held.cause in (Cause.HIT_NEAR, Cause.HIT_FAR)

    def _hit(self, row: Row) -> pb.Cause:
        far = [t for t in self._cache.tiers if row["tiers"][t.position] and t.spec.kind is TierKind.NVME]
        if not far:
            return _cause(Cause.HIT_NEAR, MEANINGS[Cause.HIT_NEAR])
        names = " and ".join(tier.spec.name for tier in far)
        text = f"{names} held a part. "
        if row["kind"] == Kind.LOOKUP:
            text += "A lookup waits for nothing. A get waits for the read."
        elif row["waited_s"]:
            text += f"The get waited {1e3 * float(row['waited_s']):.3g} ms for the reads."
        else:
            text += "The answer came before the reads ended."
        return _cause(Cause.HIT_FAR, text, tier=far[0].spec.name)

    def _namespace_of(self, row: Row) -> int:
        """The namespace of the lookup that led to this decision of the engine; 0: unknown."""
        ring = self._record.requests
        same = (ring.held["request"] == row["request"]) & (ring.held["session"] == row["session"])
        rows = ring.newest_first(true_rows(same & (ring.held["namespace"] > 0)))
        return int(ring.rows["namespace"][rows[0]]) if len(rows) and row["request"] else 0


def _cause(
    cause: Cause, text: str, *, tier: str = "", ago_s: float = -1.0, facts: Mapping[str, str] | None = None
) -> pb.Cause:
    return pb.Cause(cause=cause, text=text, tier=tier, ago_s=ago_s, facts=facts)


async def _in_pieces(rows: Iterable[Any]) -> AsyncIterator[Any]:
    """The rows; other calls run between two pieces of them."""
    for number, row in enumerate(rows):
        if number % PIECE == PIECE - 1:
            await asyncio.sleep(0)
        yield row


def _wanted(row: Row) -> str:
    """The request that got the room of an evicted block, in words."""
    need = NEEDS.get(Reason(row["need"]), "a put of block" if row["wanted"].any() else "the next puts")
    name = f" {row['wanted'].tobytes().hex()[:SHOWN_DIGITS]}" if row["wanted"].any() else ""
    return f"{need}{name}" + (f" of session {str(row['session'])[:SESSION_DIGITS]}" if row["session"] else "")


def _heads(hashes: Bytes) -> Ids:
    """The first 8 bytes of each hash."""
    return np.ascontiguousarray(hashes[:, :8]).view("<i8")[:, 0]


def _begin_with(hashes: Bytes, prefix: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which hashes begin with these hexadecimal digits."""
    whole = bytes.fromhex(prefix[: len(prefix) // 2 * 2])
    out = (hashes[:, : len(whole)] == np.frombuffer(whole, np.uint8)).all(axis=1)
    if len(prefix) % 2:
        out &= hashes[:, len(whole)] >> 4 == int(prefix[-1], 16)
    return np.asarray(out, bool)
