"""Everything that decides a page's bytes and is not in SGLang's page hashes.

A storage configuration and a pool become a namespace and a rank in it. SGLang's keys name tokens,
the request's extra key and its cache salt. The namespace contains model, parallel shape, layout,
types, lengths and SGLang's start options. Ranks with different bytes have different numbers; ranks
with the same bytes (MLA) have one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field
from sglang.version import __version__

from tierd.client import About, NamespaceSpec
from tierd.errors import ConfigError
from tierd.integrations.facts import EngineFacts
from tierd.integrations.options import Options
from tierd.integrations.sglang.pages import HostPages
from tierd.integrations.sglang.started import started

MAMBA = "mamba"
"""A kind of pool of which each tensor-parallel rank has its own part, even with replicated KV."""
THEIRS = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})
"""Words of the extra configuration that SGLang reads itself but does not remove."""
SHAPE = (
    "layout",
    "dtype",
    "temporal_dtype",
    "conv_dtype",
    "start_layer",
    "end_layer",
    "layer_num",
    "head_num",
    "head_dim",
    "storage_format_tag",
)
"""Attributes of pools that decide the meaning of their bytes."""
HASH = re.compile("[0-9a-f]{64}")
EVENT_HASH_CHARS = 16
"""Characters of a hash in the integers of SGLang's own KV events."""


class HiCacheOptions(Options):
    """prefill_tokens_per_s: how fast the engine computes prompts, for the advisor; SGLang does not tell
    its storage. 0: not known, and everything is loaded."""

    prefill_tokens_per_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class Place:
    """This rank among those that hold different bytes of the same pages."""

    rank: int
    count: int
    is_writer: bool


def options_of(config: Any) -> HiCacheOptions:
    """tierd's part of the extra configuration; the advisor is off without a rate. Raises ConfigError."""
    words = {name: value for name, value in (config.extra_config or {}).items() if name not in THEIRS}
    options = HiCacheOptions.read(words, where="hicache-storage-backend-extra-config")
    return options if options.prefill_tokens_per_s else options.model_copy(update={"advisor": False})


def is_replicated(config: Any, pool_name: str, pool: Any) -> bool:
    """Whether every tensor-parallel rank holds the same pages. True for an MLA model, except its
    states, and a draft's keys and values if these are split by heads."""
    return bool(config.is_mla_model) and pool_name != MAMBA and not hasattr(pool, "head_num")


def has_no_writers(config: Any, pool_name: str, pool: Any) -> bool:
    """Whether SGLang never stores some ranks' own pages: for MLA it stores only one rank's, except states."""
    is_split = not is_replicated(config, pool_name, pool) and pool_name != MAMBA
    return bool(config.is_mla_model) and config.tp_size > 1 and is_split


def place_of(config: Any, pool_name: str, pool: Any) -> Place:
    """A pool's place on this rank, and whether this rank writes it."""
    is_shared = is_replicated(config, pool_name, pool)
    rank, count = (config.dcp_rank, config.dcp_size) if is_shared else (config.tp_rank, config.tp_size)
    for part, parts in ((config.pp_rank, config.pp_size), (config.attn_cp_rank, config.attn_cp_size)):
        rank, count = rank * parts + part, count * parts
    return Place(rank, count, is_writer=not is_shared or bool(config.is_storage_writer))


def spec_of(config: Any, options: Options, pages: HostPages, *, name: str, cleared: str = "") -> NamespaceSpec:
    """The namespace of a pool's pages. cleared: separates pages stored after a clear. Raises ConfigError."""
    model = options.model or config.model_name
    if not model:
        raise ConfigError(
            "hicache-storage-backend-extra-config.model: not set, and SGLang gives no model name; name the model"
        )
    return NamespaceSpec(
        model=model,
        weights_digest=options.weights_digest,
        tokens_per_block=pages.page_tokens,
        block_bytes=sum(pages.lengths),
        group=name,
        salt=_digest(_words(config, pages, name) | {"cleared": cleared, "started": started(options)}),
        rank_count=place_of(config, name, pages.pool).count,
    )


def about_of(keys: Sequence[str], before: Sequence[str]) -> About | None:
    """SGLang's own event names of these pages, for routers; None if a key is no hash. before: keys
    of the preceding pages."""
    known = [*before[-1:], *keys]
    if not all(map(HASH.fullmatch, known)):
        return None
    names = [bytes.fromhex(key[:EVENT_HASH_CHARS]) for key in known]
    return About(names[-len(keys) :], names[0] if before else b"")


def facts_of(config: Any, options: Options, pages: HostPages | None = None) -> EngineFacts:
    """The facts known now; those of the pool only after SGLang has registered it."""
    pool = pages.pool if pages else None
    return EngineFacts(
        engine="sglang",
        version=__version__,
        face="TierdHiCache",
        model=options.model or config.model_name or "",
        hash_algorithm="sha256",
        tokens_per_block=str(pages.page_tokens) if pages else "",
        dtype=_word(getattr(pool, "dtype", "")),
        layout=str(getattr(pool, "layout", "")),
        ranks=f"{config.tp_rank}/{config.tp_size}",
        role=f"hicache pp{config.pp_rank}" if config.pp_size > 1 else "hicache",
    )


def _words(config: Any, pages: HostPages, name: str) -> dict[str, Any]:
    return {
        "face": "TierdHiCache",
        "release": ".".join(__version__.split(".")[:2]),
        "form": pages.form,
        "pool": type(pages.pool).__name__,
        "lengths": pages.lengths,
        "is_mla": bool(config.is_mla_model),
        "tp": 0 if is_replicated(config, name, pages.pool) else config.tp_size,
        "pp": config.pp_size,
        "cp": config.attn_cp_size,
        "dcp": config.dcp_size,
    } | {word: _word(getattr(pages.pool, word, None)) for word in SHAPE}


def _word(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _digest(words: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(words, sort_keys=True, default=str).encode()).hexdigest()
