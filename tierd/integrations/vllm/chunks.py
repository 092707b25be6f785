"""vLLM's offloaded chunks as tierd's blocks: their namespace, name and predecessor.

An OffloadKey (block hash, then group in 4 bytes) becomes a name in the group's namespace. tier.py
decides when chunks move. The namespace contains everything that changes the bytes of a row of
vLLM's host tier. It opens only after vLLM has chosen its hash seed, later than the tier is made.
The model is determined when the tier is made. A key carries no parent; the request's record of
positions does. If that record has a gap, the chunk begins its own chain.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import OffloadKey, get_offload_block_hash, get_offload_group_idx
from vllm.v1.kv_offload.file_mapper import FileMapper

from tierd.client import About, Group, NamespaceSpec, OpenedNamespace, PutGroup
from tierd.client.values import NO_HASHES
from tierd.core.formats.model import ROOT
from tierd.integrations.facts import EngineFacts
from tierd.integrations.options import Options
from tierd.integrations.store import EngineStore
from tierd.integrations.vllm.identity import engine_words, files_of, model_words

UNKNOWN = -1
"""Position of a chunk that the request does not know."""
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of a transfer job. `keys` are vLLM's names; `rows`, one a key, are of its host tier.
    For each key that the request knows, `ends` is where its tokens end."""

    keys: Sequence[OffloadKey]
    rows: Sequence[int]
    ends: Mapping[OffloadKey, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive chunks of one group. members: indices into the job; before: key of the chunk
    before the first, if it is known."""

    group: int
    position: int
    members: tuple[int, ...]
    before: OffloadKey | None = None


class ChunkNames:
    """Namespaces of all groups over one store; threads may share it. `spec` is vLLM's
    OffloadingSpec, row_bytes the size of a chunk in the host tier."""

    def __init__(self, store: EngineStore, spec: Any, *, row_bytes: int, options: Options) -> None:
        self._store, self._spec, self._row_bytes, self._options = store, spec, row_bytes, options
        self._model = _model_words(spec, options)
        self._tokens: dict[int, int] = {
            g.group_id: g.tokens_per_block * spec.blocks_per_chunk for g in spec.config.groups
        }
        self._spaces: dict[int, OpenedNamespace] = {}
        self._turn = threading.Lock()

    def group(self, keys: Sequence[OffloadKey], *, group: int) -> Group:
        """Chunks to look up or load; without hashes while there is no daemon."""
        space = self._space(group)
        return Group(space, space.fold([get_offload_block_hash(key) for key in keys]))

    def put_group(self, chunks: Chunks, run: Run) -> PutGroup:
        """Chunks to store, with vLLM's names for routers. Their tokens are unknown here."""
        space = self._space(run.group)
        names = [get_offload_block_hash(chunks.keys[i]) for i in run.members]
        before = b"" if run.before is None else get_offload_block_hash(run.before)
        parent = space.fold([before])[0].tobytes() if space.is_open and before else ROOT
        about = About(names, before)
        return PutGroup(space, space.fold(names), parent=parent, position=max(0, run.position), about=about)

    def runs(self, chunks: Chunks) -> list[Run]:
        """The job's chunks in the order of their sequences."""
        places = [self._place(key, chunks) for key in chunks.keys]
        parts: list[list[int]] = []
        for i in sorted(range(len(places)), key=places.__getitem__):
            if parts and _follows(places[parts[-1][-1]], places[i]):
                parts[-1].append(i)
            else:
                parts.append([i])
        before = self._before(chunks, {places[part[0]] for part in parts})
        return [Run(*places[part[0]], tuple(part), before.get(places[part[0]])) for part in parts]

    def _before(self, chunks: Chunks, places: Collection[tuple[int, int]]) -> dict[tuple[int, int], OffloadKey]:
        """The keys that the request knows to precede these positions."""
        ends = {position * self._tokens[group] for group, position in places if position > 0}
        known = ((*self._place(key, chunks), key) for key, end in chunks.ends.items() if end in ends)
        return {(group, position + 1): key for group, position, key in known}

    def _place(self, key: OffloadKey, chunks: Chunks) -> tuple[int, int]:
        """Group, and number of the chunk in its sequence."""
        group, end = get_offload_group_idx(key), chunks.ends.get(key, 0)
        return group, (end - 1) // self._tokens[group] if end else UNKNOWN

    def _space(self, group: int) -> OpenedNamespace:
        with self._turn:
            space = self._spaces.get(group)
            if space is None:
                self._store.introduce(facts_of(self._spec))
                space = self._spaces[group] = self._store.open(self._spec_of(group))
        if not space.is_open:
            self._store.lookup([Group(space, NO_HASHES)])  # opens it as soon as there is a daemon
        return space

    def _spec_of(self, group: int) -> NamespaceSpec:
        config = self._spec.config
        return NamespaceSpec(
            model=self._options.model or config.model.name,
            weights_digest=self._options.weights_digest,
            tokens_per_block=self._tokens[group],
            block_bytes=self._row_bytes,
            group=str(group),
            salt=salt_of(self._spec, self._model),
        )


def salt_of(spec: Any, model: Mapping[str, Any]) -> str:
    """Digest of all else that decides a row's bytes.

    These are the words of vLLM's own file tier, the physical layout, the release, the start of its
    hashes, and the model. Topologies share rows only if vLLM certified the layout (canonical) or
    keeps one copy (replicated).
    """
    config = spec.config
    shared = bool(config.canonical_layout or config.replicated_layout)
    files = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk, parallel_agnostic=shared)
    words = files.get_run_config() | engine_words()
    words |= {"face": "TierdTier", "kv_cache_layout": str(config.kv_cache_layout), "model": model}
    return hashlib.sha256(json.dumps(words, sort_keys=True, default=str).encode()).hexdigest()


def hash_algorithm() -> str:
    """vLLM's hash algorithm; "" before vLLM has started its hashes."""
    found = getattr(kv_cache_utils, "NONE_HASH", None)
    seed = kv_cache_utils.get_none_hash_seed()
    for name in ALGORITHMS if found else ():
        try:
            if get_hash_fn_by_name(name)(seed) == found:
                return name
        except ImportError:  # xxhash, optional for vLLM
            continue
    return ""


def facts_of(spec: Any) -> EngineFacts:
    """The facts known now; the hash algorithm is known only after vLLM has started its hashes."""
    config = spec.config
    return EngineFacts(
        engine="vllm",
        version=vllm.__version__,
        face="TierdTier",
        model=config.model.name,
        hash_algorithm=hash_algorithm(),
        hash_seed=kv_cache_utils.get_none_hash_seed(),
        tokens_per_block="/".join(str(g.tokens_per_block * spec.blocks_per_chunk) for g in config.groups),
        dtype=config.model.dtype,
        layout=str(config.kv_cache_layout or ""),
        ranks=f"0/{config.parallel.world_size}",
        role="scheduler",
    )


def _model_words(spec: Any, options: Options) -> dict[str, Any]:
    """The connector's words if vLLM's configuration is available, else those of the checkpoint's files."""
    config = _config_behind(spec)
    if config is not None:
        return model_words(config, options)
    logger.warning(
        "tierd: vLLM's configuration was not found: set weights_digest if a model has several weights (--hf-overrides)"
    )
    return {"files": () if options.weights_digest else files_of(spec.config.model.name)}


def _config_behind(spec: Any) -> Any:
    """The VllmConfig of the engine that makes a tier; None if no caller has it. vLLM passes its
    tiers a name, a type and sizes, but not the user's overrides of the model. So this searches
    the calling frames for the configuration with the spec's engine_id."""
    frame = inspect.currentframe()
    while frame is not None:
        config = frame.f_locals.get("vllm_config")
        if getattr(getattr(config, "kv_transfer_config", None), "engine_id", None) == spec.config.engine_id:
            return config
        frame = frame.f_back
    return None


def _follows(before: tuple[int, int], after: tuple[int, int]) -> bool:
    return before[0] == after[0] and 0 <= before[1] == after[1] - 1
