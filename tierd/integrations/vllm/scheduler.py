"""The connector in vLLM's scheduler: lookups, loads, saves, and blocks that must not be reused yet.

It decides from vLLM's own hashes and block ids; worker.py handles KV bytes. A thread makes one
lookup a request. The scheduler waits at most lookup_grace_s a step for it and asks again in later
steps. At the lookup's own deadline it is a miss. Claims are bounded by match.claim, once a request.
The pool of vLLM retains a block being saved until every worker has reported. So no end of a
request, preemption or sliding window gives it to another request. The number of retained blocks is
bounded.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tierd.client import Found, OpenedNamespace
from tierd.client.advice import NOTHING, Blocks, Claim
from tierd.client.match import Match
from tierd.integrations.courier import Courier
from tierd.integrations.store import EngineStore
from tierd.integrations.vllm.identity import AdapterFiles
from tierd.integrations.vllm.options import ConnectorOptions
from tierd.integrations.vllm.plan import NULL_BLOCK, Done, GroupLoad, Load, Orders, Save
from tierd.integrations.vllm.same_step import StepLoad, can_confirm_later
from tierd.integrations.vllm.spaces import (
    Space,
    facts_of,
    is_kept_by_blocks,
    is_replicated,
    spaces_of,
    stamped,
    step_tokens,
    tokens_of,
)
from tierd.integrations.vllm.stats import medium_of

END_S = 2.0
"""Seconds that a shutdown waits for lookups in flight."""
PATIENCE = 10
"""A load in the step ends after so many times step_load_s: no step waits longer for it."""
FRESH_S = 1.0
"""A request that queued for longer is looked up again."""


@dataclass
class Entry:
    """State of a request.

    stamp: of its adapter. number: of its lookup, which begun and is late after until.
    found: None until that ends.
    computed: tokens that vLLM had at the claim. claimed: what is loaded, and since when.
    is_spent: it had a match once.
    is_loading: its blocks are not filled yet.
    is_in_step: they are filled by the step that computes with them.
    is_renewed: its lookup was repeated, because the first was old.
    saved: per group, leading blocks that are stored or handed to a save.
    """

    request: Any
    stamp: bytes = b""
    begun: float = 0.0
    until: float = 0.0
    life: int = 0
    number: int = 0
    found: Found | None = None
    computed: int = 0
    claimed: Claim = NOTHING
    loading_since: float = 0.0
    is_spent: bool = False
    is_loading: bool = False
    is_in_step: bool = False
    is_renewed: bool = False
    saved: list[int] = field(default_factory=list)


class SchedulerSide:
    """config: VllmConfig; kv: KVCacheConfig. One thread calls it. Raises Unsupported, ConfigError."""

    def __init__(self, config: Any, kv: Any, options: ConnectorOptions) -> None:
        self._config, self._kv, self._options = config, kv, options
        self._salt = ""
        self._spaces = spaces_of(config, kv, options)
        self._opened: dict[int, OpenedNamespace] = {}
        self._store = EngineStore(options, facts_of(config, kv, role="scheduler"))
        self._courier: Courier[tuple[str, int], Found] = Courier("tierd-lookup", threads=1, limit=options.queue_limit)
        self._lookups, self._grace_s = 0, options.lookup_grace_s
        self._ranks = 1 if is_replicated(kv) else config.parallel_config.tensor_parallel_size
        self._adapters = AdapterFiles(options)
        self._entries: dict[str, Entry] = {}
        self._orders = Orders()
        self._retained: dict[int, list[Any]] = {}
        self._ended: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()
        self._steps: dict[int, tuple[float, list[tuple[int, int]]]] = {}  # by number, under way
        self._step, self._step_ended, self._is_warm = 0, 0.0, False
        self._step_loads: list[StepLoad] = []
        self._step_load_s = 0.0  # expected of those ordered for the next step
        self._loads_in_step = _may_load_in_step(config, kv)
        self._cache: Any = None
        self._number = 0
        self._has_begun = False
        role = config.kv_transfer_config
        self._may_load, self._may_save = role.is_kv_consumer, role.is_kv_producer
        self._is_off = not config.cache_config.enable_prefix_caching
        """Prefix caching is off, by choice or because the backend lacks it (latent attention on the
        CPU). vLLM would ignore loaded blocks."""

    @property
    def is_off(self) -> bool:
        """Whether nothing is looked up, loaded or saved."""
        return self._is_off

    def bind(self, cache: Any) -> None:
        """Takes vLLM's KVCacheManager."""
        self._cache = cache

    # -- lookups

    def begin(self, request: Any) -> Entry:
        """Looks up a request that is new, was preempted, or whose first answer is stale."""
        self._begin_hashes()
        self._lookups += 1
        stamp = self._adapters.stamp(request.lora_request)
        entry = Entry(request, stamp, life=request.num_preemptions, number=self._lookups)
        entry.saved = [0] * len(self._spaces)
        self._entries[request.request_id] = entry
        tokens = (request.num_tokens - 1) // step_tokens(self._spaces) * step_tokens(self._spaces)
        names = [stamped(space.names(request.block_hashes, tokens=tokens), stamp) for space in self._spaces]
        entry.begun = time.monotonic()
        entry.until = entry.begun + 2 * self._options.lookup_timeout_s
        key = (request.request_id, entry.number)
        if (
            tokens == 0
            or not self._may_load
            or not self._courier.submit(key, partial(self._look, self._spaces, names, request.request_id))
        ):
            entry.found = Found()
        else:
            self._counts["lookup_tokens"] += tokens
        return entry

    def match(self, request: Any, computed: int) -> int | None:
        """Tokens beyond `computed` to load; None: not known yet."""
        if self._is_off:
            return 0
        entry = self._entries.get(request.request_id)
        is_new = entry is None or entry.life != request.num_preemptions
        if entry is None or is_new:
            entry = self.begin(request)
        elif not (entry.is_renewed or entry.is_spent) and time.monotonic() - entry.begun > FRESH_S:
            entry = self.begin(request)
            entry.is_renewed = True
        if entry.is_spent:
            return 0
        if entry.found is None and not self._await(entry):
            return None
        assert entry.found is not None
        seen = Match(entry.found.tokens, computed, request.num_tokens, entry.found.tier_tokens, request.request_id)
        entry.computed = computed
        group, space = self._whole_space()
        size = sum(each.spec.block_bytes / each.tokens for each in self._spaces) * self._ranks
        least = self._options.least_load_tokens
        blocks = Blocks(space.tokens, size, group, step_tokens=step_tokens(self._spaces), least_tokens=least)
        entry.claimed = self._store.advice.claim(seen, entry.found, blocks)
        entry.is_in_step = self._loads_in_step and self._is_short(entry)
        return entry.claimed.tokens

    def loads_in_step(self, request: Any) -> bool:
        """Whether the tokens of the last `match` are loaded by the step that computes the rest."""
        entry = self._entries.get(request.request_id)
        return entry is not None and entry.is_in_step

    def sources(self, request: Any, tokens: int) -> dict[str, int]:
        """Splits loaded tokens by the name of their tier. Call it right after `allocated`."""
        entry = self._entries.get(request.request_id)
        if entry is None or entry.found is None or not entry.found.tier_of:
            return {}
        at, space = self._whole_space()
        part = slice(entry.computed // space.tokens, (entry.computed + tokens) // space.tokens)
        tiers = np.asarray(entry.found.tier_of[at])[0, part]
        names = self._store.tiers
        counts = Counter(names[int(tier)] if 0 <= tier < len(names) else "" for tier in tiers)
        return {name: blocks * space.tokens for name, blocks in counts.items()}

    # -- a step

    def allocated(self, request: Any, ids: Sequence[Sequence[int]], tokens: int) -> None:
        """vLLM has allocated blocks for so many tokens to load."""
        entry = self._entries.get(request.request_id)
        if entry is None or not tokens:
            return
        entry.is_spent = entry.is_loading = True
        entry.loading_since = time.monotonic()
        for tier, count in self.sources(request, tokens).items():
            self._counts[f"hit_tokens_{medium_of(tier)}"] += count
        total = entry.computed + tokens
        loads = []
        for space, of_group in zip(self._spaces, ids, strict=True):
            first, stop = entry.computed // space.tokens, total // space.tokens
            names = stamped(space.names(request.block_hashes, tokens=total), entry.stamp)
            loads.append(GroupLoad(names, first, tuple(of_group[first:stop])))
        entry.saved = self._known([total // space.tokens for space in self._spaces])
        self._orders.loads.append(Load(request.request_id, tuple(loads), self._deadline_s(entry), entry.is_in_step))
        if entry.is_in_step:
            load = StepLoad(entry, tuple(ids[0]), entry.computed // self._spaces[0].tokens)
            load.hide(self._cache.block_pool)
            self._step_loads.append(load)
            self._step_load_s += entry.claimed.load_s
            self._counts["step_loads"] += 1

    def orders(self, output: Any) -> Orders:
        """The workers' orders for this step's SchedulerOutput."""
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for load in self._step_loads:
            name = load.entry.request.request_id
            load.ready = computed.get(name, 0) + output.num_scheduled_tokens.get(name, 0)
        for request_id, tokens in output.num_scheduled_tokens.items():
            entry = self._entries.get(request_id)
            ready = computed.get(request_id, 0) + tokens
            if entry is not None and not self._step_loads and self._has_unsaved(entry, ready):
                self._save(entry, self._cache.get_block_ids(request_id), ready)
        parts = [(computed.get(name, 0), tokens) for name, tokens in output.num_scheduled_tokens.items()]
        self._step += 1
        self._steps[self._step] = time.monotonic(), parts
        orders, self._orders = self._orders, Orders()
        orders.step, orders.is_idle, self._grace_s = self._step, not parts, self._options.lookup_grace_s
        self._step_load_s = 0.0
        orders.spaces = self._spaces if orders.loads or orders.saves else ()
        return orders

    def finished(self, request: Any, ids: Sequence[Sequence[int]]) -> None:
        """Saves the blocks completed by the last steps. The request's blocks may be freed at once;
        those being saved are retained."""
        entry = self._entries.pop(request.request_id, None)
        tokens = request.num_computed_tokens - request.num_output_placeholders
        for load in self._step_loads:
            if load.entry is entry:  # whether its blocks are good is known at the end of the step
                load.ended = (ids, tokens)
        if entry is not None and not entry.is_loading:
            self._save(entry, ids, tokens)

    def reported(self, output: Any) -> None:
        """Takes a step's KVConnectorOutput: releases saved blocks and saves failed loads again."""
        done = output.kv_connector_worker_meta
        waited_s = done.waited_s if isinstance(done, Done) else 0.0
        self._end_step_loads(output.invalid_block_ids or (), waited_s)
        if isinstance(done, Done):
            self._note_step(done)
            for size, seconds in done.copies:
                self._store.advice.copied(size, seconds)
            for number, workers in done.saves.items():
                self._ended[number] += workers
                if self._ended[number] >= self._config.parallel_config.world_size:
                    self._release(number)
        if output.invalid_block_ids or output.failed_recving:
            # One of several ranks may report a failure steps before the others have ended.
            for entry in self._entries.values():
                entry.saved = [0] * len(self._spaces) if entry.is_loading else entry.saved
        for request_id in output.finished_recving or ():
            if (ended := self._entries.get(request_id)) and ended.is_loading:
                ended.is_loading = False
                self._store.advice.loaded(ended.claimed, time.monotonic() - ended.loading_since)

    @property
    def is_retaining(self) -> bool:
        """Whether blocks are kept from reuse until a save ends, or a save waits for a step."""
        return bool(self._retained)

    def forget(self) -> None:
        """Makes all blocks stored so far invisible to this engine, whose weights may have changed.
        Drops saves that have not begun."""
        for save in self._orders.saves:
            self._release(save.number)
        self._orders.saves.clear()
        self._salt = secrets.token_hex(16)
        self._spaces, self._opened = spaces_of(self._config, self._kv, self._options, salt=self._salt), {}
        known, self._entries = self._entries, {}
        for entry in known.values():
            # others compute on the old weights: not saved
            if entry.request.num_computed_tokens == 0:
                self.begin(entry.request)

    def take_counts(self) -> Counter[str]:
        """Counts since the last call."""
        counts, self._counts = self._store.take_counts() + self._counts, Counter()
        return counts + self._store.advice.take_counts()

    def close(self) -> None:
        """Ends the session."""
        self._courier.close(timeout_s=END_S)
        self._store.close()

    # -- inside

    def _whole_space(self) -> tuple[int, Space]:
        """The first group that needs all blocks of a prefix, and its number."""
        return next(((at, space) for at, space in enumerate(self._spaces) if not space.need), (0, self._spaces[0]))

    def _is_short(self, entry: Entry) -> bool:
        """Whether a step may wait for a request's load, with those that it has already. All is in
        memory then, and the loads are expected to take step_load_s at most."""
        load_s = entry.claimed.load_s
        if not 0 < load_s <= self._options.step_load_s - self._step_load_s:
            return False
        return {medium_of(tier) for tier in self.sources(entry.request, entry.claimed.tokens)} == {"host"}

    def _deadline_s(self, entry: Entry) -> float:
        """How long a load may take: what computing would have, within the options."""
        if entry.is_in_step:
            return PATIENCE * self._options.step_load_s
        return min(self._options.timeout_s, max(self._options.load_deadline_s, entry.claimed.compute_s))

    def _end_step_loads(self, bad: Collection[int], waited_s: float) -> None:
        """Takes the loads of the step that has ended. Good blocks are in vLLM's prefix cache again, and
        those that the step completed are saved."""
        loads, self._step_loads = self._step_loads, []
        for load in loads:
            entry, has_failed = load.entry, load.has_failed(bad)
            entry.is_loading = entry.is_in_step = False
            if has_failed:
                entry.saved = [0] * len(self._spaces)
                continue
            load.show(self._cache.block_pool, self._spaces[0].tokens)
            self._store.advice.loaded(entry.claimed, waited_s)
            if load.ended is not None:
                self._save(entry, *load.ended)
        self._counts["step_wait_us"] += int(1e6 * waited_s)

    def _note_step(self, done: Done) -> None:
        """Tells the advisor how long the step computed that ended now. vLLM may have begun the next
        before. The first step that computes also warms the engine up, and does not count."""
        begun, parts = self._steps.pop(done.step, (0.0, []))
        self._steps = {number: step for number, step in self._steps.items() if number > done.step}
        now = time.monotonic()
        if parts and self._is_warm:
            self._store.advice.computed(parts, now - max(begun, self._step_ended) - done.waited_s)
        self._is_warm |= bool(parts)
        self._step_ended = now

    def _begin_hashes(self) -> None:
        """vLLM chooses the start of its hashes after it makes the connector, before the first request."""
        if not self._has_begun:
            self._has_begun = True
            self._spaces = spaces_of(self._config, self._kv, self._options)
            self._store.introduce(facts_of(self._config, self._kv, role="scheduler"))

    def _look(self, spaces: tuple[Space, ...], names: Sequence[tuple[bytes, ...]], request: str) -> Found:
        """Runs in the courier's thread."""
        opened = [self._space(space) for space in spaces]
        ranks = tuple(range(self._ranks))
        return self._store.lookup(
            [
                space.group(at, of_group, ranks=ranks, request=request)
                for space, at, of_group in zip(spaces, opened, names, strict=True)
            ]
        )

    def _space(self, space: Space) -> OpenedNamespace:
        found = self._opened.get(space.index)
        if found is None or found.spec != space.spec or not found.is_open:
            found = self._opened[space.index] = self._store.open(space.spec)
        return found

    def _await(self, entry: Entry) -> bool:
        """Whether the request's lookup has ended, in any way. All requests of a step share its grace."""
        self._collect()
        if entry.found is None and self._grace_s > 0:
            began = time.monotonic()
            self._courier.await_any(timeout_s=self._grace_s)
            self._grace_s -= time.monotonic() - began
            self._collect()
        if entry.found is None and time.monotonic() > entry.until:
            entry.found = Found()
        return entry.found is not None

    def _collect(self) -> None:
        for outcome in self._courier.finished():
            request_id, number = outcome.key
            entry = self._entries.get(request_id)
            if entry is not None and entry.number == number and entry.found is None:
                entry.found = outcome.value or Found()
                if not entry.is_spent:
                    entry.saved = self._blocks_found(entry.found)

    def _blocks_found(self, found: Found) -> list[int]:
        """Per group, leading blocks that need no saving. A window's unneeded blocks may be missing."""
        return self._known([found.tokens // space.tokens if not space.need else 0 for space in self._spaces])

    def _known(self, blocks: list[int]) -> list[int]:
        """Zeros if routers receive events: a restarted daemon has blocks but has lost vLLM's names for them."""
        return [0] * len(blocks) if self._store.tells_events else blocks

    def _savable(self, request: Any, tokens: int) -> int:
        if not self._may_save:
            return 0
        return tokens if self._options.save_generated else min(tokens, request.num_prompt_tokens)

    def _has_unsaved(self, entry: Entry, tokens: int) -> bool:
        """Whether computing so many tokens fills an unsaved block. Cheap: called for every request and step."""
        hashes, tokens = entry.request.block_hashes, self._savable(entry.request, tokens)
        pairs = zip(self._spaces, entry.saved, strict=True)
        return any(space.blocks(hashes, tokens=tokens) > saved for space, saved in pairs)

    def _save(self, entry: Entry, ids: Sequence[Sequence[int]], tokens: int) -> None:
        """Orders saves of all blocks full after so many computed tokens, and retains them."""
        request = entry.request
        tokens = self._savable(request, tokens)
        for at, space in enumerate(self._spaces):
            full = min(space.blocks(request.block_hashes, tokens=tokens), len(ids[at]))
            if full <= entry.saved[at]:
                continue
            for start, end in _runs(ids[at], entry.saved[at], full):
                stop = min(end, start + self._room())
                if start < stop:
                    self._orders.saves.append(self._ordered(entry, at, start, ids[at][start:stop]))
                entry.saved[at] = stop
                if stop < end:  # the rest waits for a later step
                    return
            entry.saved[at] = full

    def _ordered(self, entry: Entry, group: int, start: int, ids: Sequence[int]) -> Save:
        """A save of blocks of one group from number `start` on, which are retained."""
        request = entry.request
        size, stop = self._spaces[group].tokens, start + len(ids)
        names = self._spaces[group].names(request.block_hashes, tokens=stop * size)
        before = names[start - 1] if start else b""
        tokens = tokens_of(request, start * size, stop * size)
        return Save(self._retain(ids), group, start, before, names[start:], tuple(ids), tokens, entry.stamp)

    def _room(self) -> int:
        """Blocks that may still be retained."""
        retained = sum(map(len, self._retained.values()))
        return max(0, int(self._options.retained_share * self._cache.block_pool.num_gpu_blocks) - retained)

    def _retain(self, ids: Sequence[int]) -> int:
        """Number of a save that keeps these blocks from reuse."""
        pool = self._cache.block_pool
        blocks = [pool.blocks[i] for i in ids]
        pool.touch(blocks)
        self._number += 1
        self._retained[self._number] = blocks
        return self._number

    def _release(self, number: int) -> None:
        del self._ended[number]
        blocks = self._retained.pop(number, None)
        if blocks:
            self._cache.block_pool.free_blocks(reversed(blocks))


def _may_load_in_step(config: Any, kv: Any) -> bool:
    """Whether vLLM computes a request again whose blocks fail in the step that computes with them.

    It cannot if a group is not the only one, or has a window. With async scheduling it takes one
    token of the next step, which has begun and reads the bad blocks.
    """
    return is_kept_by_blocks(kv) and not config.scheduler_config.async_scheduling and can_confirm_later()


def _runs(ids: Sequence[int], start: int, stop: int) -> list[tuple[int, int]]:
    """Ranges within [start, stop) without a null block."""
    runs: list[tuple[int, int]] = []
    for i in range(start, stop):
        if ids[i] == NULL_BLOCK:
            continue
        if runs and runs[-1][1] == i:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return runs
