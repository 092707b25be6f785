"""The machine and the model that a measurement stands for, and both scaled down.

Scaling divides the bytes of a token and the bandwidths by one number. All times stay as they are.
A block then holds more tokens, so that its bytes stay as they are too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from tierd.core.formats.block import DTYPE_BYTES, KVGeometry
from tierd.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Machine:
    """link: from host memory to the engine's own; latency of each copy. disk: latency of each read.

    prefill_tokens_per_s: at the begin of a context. half_context: tokens of context at which the
    rate is half of that.
    """

    link_bytes_per_s: float
    link_latency_s: float
    disk_bytes_per_s: float
    disk_latency_s: float
    prefill_tokens_per_s: float
    half_context: float

    def prefill_s(self, start: float, tokens: float) -> float:
        """Seconds to compute `tokens` tokens after `start` others."""
        return tokens * (1 + (start + tokens / 2) / self.half_context) / self.prefill_tokens_per_s

    def scaled(self, scale: float) -> Self:
        """The machine with bandwidths divided by `scale`."""
        return replace(
            self,
            link_bytes_per_s=self.link_bytes_per_s / scale,
            disk_bytes_per_s=self.disk_bytes_per_s / scale,
        )


PRESETS = {"h100": Machine(55e9, 10e-6, 7e9, 100e-6, 20_000.0, 100_000.0)}
"""h100: PCIe 5 x16, one NVMe drive, and the prefill of Llama-3-8B in bfloat16."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The KV cache of a model. Its default is that of Llama-3-8B, in blocks of 16 tokens."""

    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    tokens_per_block: int = 16

    @property
    def layer_bytes(self) -> int:
        """Of a block."""
        return 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype] * self.tokens_per_block

    @property
    def block_bytes(self) -> int:
        """Of all layers."""
        return self.layers * self.layer_bytes

    @property
    def token_bytes(self) -> float:
        """Bytes of a token in all layers."""
        return self.block_bytes / self.tokens_per_block

    @property
    def geometry(self) -> KVGeometry:
        """As a namespace has it."""
        return KVGeometry(self.layers, self.kv_heads, self.head_dim, self.dtype)

    def scaled(self, scale: int) -> Self:
        """Tokens of fewer bytes in blocks of as many bytes. Raises InvalidArgument if the channels
        of a token cannot be divided by `scale`."""
        channels = self.kv_heads * self.head_dim
        if channels % scale:
            raise InvalidArgument(
                f"--scale: {scale} does not divide the {channels} channels of a layer; use a divisor, such as 16"
            )
        small = replace(self, kv_heads=1, head_dim=channels // scale)
        return replace(small, tokens_per_block=self.tokens_per_block * scale)
