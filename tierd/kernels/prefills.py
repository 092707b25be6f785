"""Prefill by FlashAttention-3 or FlashInfer, where one of them is installed, over the same pages.

`find_prefill` chooses for a GPU; KernelAttention asks `takes` for each pass. They attend to pages
of 16 bits in place, without windows and chosen pages; tierd's kernel does all else. Sources:
flash-attention, hopper/flash_attn_interface.py (`flash_attn_with_kvcache`: natural log-sum-exps by
heads); FlashInfer, `BatchPrefillWithPagedKVCacheWrapper` (those to base 2, by rows). No GPU has run
this module yet; `make gpu` compares all three.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tierd.errors import ConfigError
from tierd.kernels.arguments import DeviceBatch
from tierd.kernels.buffers import BYTES, Buffer
from tierd.kernels.pages import KvPages
from tierd.kernels.reference import PagedBatch

Array = Any
"""A torch tensor."""
PREFILL = "TIERD_PREFILL"
"""Environment: `tierd`, `fa3` or `flashinfer`; empty: the first one that is installed, else tierd's."""
DIMS = (64, 128, 256)
TYPES = {"f16": "float16", "bf16": "bfloat16"}
WORKSPACE_BYTES = 128 << 20
"""As FlashInfer advises."""


def takes(batch: PagedBatch, kv: KvPages) -> bool:
    """Whether the others have what a pass asks for."""
    k, rows = Buffer.of("pages.k", kv.k), np.diff(batch.query_starts)
    has_all = batch.is_plain and min(batch.kv_lens) > 0 and rows.min() > 0
    return has_all and k.dtype in TYPES and kv.k_scales is None and k.shape[-1] in DIMS


@dataclass
class FlashAttention3:
    """module: flash_attn_interface. name: of the package and its version."""

    torch: Any
    module: Any
    name: str

    def begin(self, batch: PagedBatch, placed: DeviceBatch, page_tokens: int) -> Any:
        """Makes the part that all layers of a pass share. batch, placed: on the host and the device."""
        starts = self.torch.tensor(list(batch.query_starts), dtype=self.torch.int32, device=placed.tables.device)
        return placed, starts, int(np.diff(batch.query_starts).max())

    def attend(self, begun: Any, q: Array, kv: KvPages) -> tuple[Array, Array]:
        """Attends in one layer: out, and natural lse. q: [tokens, q_heads, head_dim], dense."""
        placed, starts, longest = begun
        out, lse, *_ = self.module.flash_attn_with_kvcache(
            q,
            tensor_of(self.torch, kv.k),
            tensor_of(self.torch, kv.v),
            cache_seqlens=placed.kv_lens,
            page_table=placed.tables,
            cu_seqlens_q=starts,
            max_seqlen_q=longest,
            causal=True,
            return_softmax_lse=True,
        )
        return out, lse.T


@dataclass
class FlashInfer:
    """module: flashinfer. Its wrapper plans on the host, once for all layers of a pass."""

    torch: Any
    module: Any
    name: str
    _wrapper: Any = None
    _planned: Any = None

    def begin(self, batch: PagedBatch, placed: DeviceBatch, page_tokens: int) -> Any:
        """As FlashAttention3's: numbers of the used pages, one sequence after another."""
        if self._wrapper is None:
            room = self.torch.zeros(WORKSPACE_BYTES, dtype=self.torch.uint8, device=placed.tables.device)
            self._wrapper = self.module.BatchPrefillWithPagedKVCacheWrapper(room, "NHD")
        lens = np.asarray(batch.kv_lens, np.int32)
        used = -(-lens // page_tokens)
        is_used = np.arange(placed.tables.shape[1]) < used[:, None]
        starts = np.asarray(batch.query_starts, np.int32), np.append([0], np.cumsum(used)).astype(np.int32)
        numbers = placed.tables[self.torch.from_numpy(is_used).to(placed.tables.device)]
        host = [self.torch.from_numpy(array) for array in (*starts, lens - (used - 1) * page_tokens)]
        return host[0], host[1], numbers, host[2]

    def attend(self, begun: Any, q: Array, kv: KvPages) -> tuple[Array, Array]:
        """As FlashAttention3's. It plans before the first layer, and anew after another pass."""
        k, v = tensor_of(self.torch, kv.k), tensor_of(self.torch, kv.v)
        if self._planned is not begun:
            heads, types = (
                (q.shape[1], k.shape[2], q.shape[2], k.shape[1]),
                {"q_data_type": q.dtype, "kv_data_type": k.dtype},
            )
            self._wrapper.plan(*begun, *heads, causal=True, **types)
            self._planned = begun
        out, lse = self._wrapper.run(q, (k, v), return_lse=True)
        return out, lse * math.log(2)


Prefill = FlashAttention3 | FlashInfer


def find_prefill(torch: Any, device: str) -> Prefill | None:
    """The one to use; None: tierd's. Raises ConfigError for another word in TIERD_PREFILL, and if
    the one that it asks for is not installed or not for this GPU."""
    asked = os.environ.get(PREFILL, "")
    if asked not in ("", "tierd", *FINDERS):
        raise ConfigError(f"{PREFILL}: is {asked!r}; set it to tierd, {' or '.join(FINDERS)}, or not at all")
    for name, find in FINDERS.items():
        if asked in ("", name) and (found := find(torch, device)):
            return found
    if asked in FINDERS:
        raise ConfigError(f"{PREFILL}: {asked} is not installed, or not for {device}; install it, or set it to tierd")
    return None


def tensor_of(torch: Any, array: Array) -> Array:
    """A tensor over memory by its address; it does not own it."""
    found = Buffer.of("pages", array)
    words: Any = _Words(found)
    whole = (
        torch.from_numpy(np.asarray(words)) if found.device == "cpu" else torch.as_tensor(words, device=found.device)
    )
    return whole.view(getattr(torch, TYPES[found.dtype]))


class _Words:
    """Values of 16 bits for torch: the interfaces have no name for bfloat16."""

    def __init__(self, found: Buffer) -> None:
        interface = {
            "version": 3,
            "shape": found.shape,
            "strides": found.strides,
            "typestr": f"<i{BYTES[found.dtype]}",
            "data": (found.address, False),
        }
        setattr(self, "__array_interface__" if found.device == "cpu" else "__cuda_array_interface__", interface)


def _find(kind: type[Prefill], package: str, torch: Any) -> Prefill | None:
    try:
        module = importlib.import_module(package)
    except Exception:  # noqa: BLE001 - a package that is built for another torch raises whatever it likes
        return None
    return kind(torch, module, f"{package} {getattr(module, '__version__', '')}".strip())


def _find_fa3(torch: Any, device: str) -> Prefill | None:
    """Only for sm_90: no other GPU has the instructions."""
    is_right = torch.cuda.get_device_capability(device)[0] == 9
    return _find(FlashAttention3, "flash_attn_interface", torch) if is_right else None


FINDERS: dict[str, Callable[[Any, str], Prefill | None]] = {
    "fa3": _find_fa3,
    "flashinfer": lambda torch, _: _find(FlashInfer, "flashinfer", torch),
}
"""Each takes torch and a device, and gives None where it cannot run."""
