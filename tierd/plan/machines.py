"""GPUs, and the times and costs of requests on them.

Computing is bound by arithmetic, decoding by reading weights, keys and values. Both reach a share
of the data sheet's figure. All of it is an estimate; `tierctl bench ttft` measures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from tierd.errors import InvalidArgument
from tierd.plan.kv import Form
from tierd.plan.models import Model

PREFILL_SHARE, DECODE_SHARE, MEMORY_SHARE = 0.5, 0.7, 0.9
"""Of peak arithmetic, of memory bandwidth, and of memory that an engine takes."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """memory: bytes. bandwidth, link, disk: bytes a second of its memory, from the host, from NVMe.
    flops: dense bfloat16. price: of an hour."""

    name: str
    memory: float
    bandwidth: float
    flops: float
    price: float
    link: float = 55e9
    disk: float = 7e9

    def times(self, count: int) -> Self:
        """So many of them as one. They share the disk."""
        return replace(
            self,
            memory=self.memory * count,
            bandwidth=self.bandwidth * count,
            flops=self.flops * count,
            price=self.price * count,
            link=self.link * count,
        )


GPUS = {
    "a100": Gpu("a100", 80e9, 2.04e12, 312e12, 1.8, link=25e9),
    "h100": Gpu("h100", 80e9, 3.35e12, 989e12, 2.5),
    "h200": Gpu("h200", 141e9, 4.8e12, 989e12, 3.2),
    "b200": Gpu("b200", 180e9, 8e12, 2250e12, 4.5),
    "l40s": Gpu("l40s", 48e9, 0.864e12, 362e12, 0.9, link=25e9),
}
"""Data sheets; prices are assumptions of this release, in dollars."""


def gpus_for(model: Model, gpu: Gpu, wanted: int | None) -> int:
    """GPUs of an engine: as wanted, else the least power of two that holds the weights and leaves a
    fifth for keys and values. Raises InvalidArgument for fewer than hold the weights, and for a
    model without a number of parameters."""
    if not model.parameters:
        raise InvalidArgument(
            f"--model: the parameters of {model.name} do not follow from its config.json; give --parameters"
        )
    weights, each = model.weight_bytes, MEMORY_SHARE * gpu.memory
    if wanted is None:
        return 1 << max(0, math.ceil(math.log2(weights / (0.8 * each))))
    if wanted * each <= weights:
        raise InvalidArgument(
            f"--gpus: {wanted} x {gpu.name} gives an engine {wanted * each / 1e9:.0f} GB, the weights of {model.name} take "
            f"{weights / 1e9:.0f}; give {int(weights // each) + 1} or more, or --weight-bits"
        )
    return wanted


def prefill_s(model: Model, gpu: Gpu, start: float, tokens: float) -> float:
    """Seconds to compute `tokens` tokens behind `start` others. Attention multiplies each query with
    the keys and the weights with the values of its context: 4 operations a value."""
    linear = 2 * model.active * tokens
    attention = 4 * model.attended_layers * model.heads * model.head_dim * tokens * (start + tokens / 2)
    return (linear + attention) / (gpu.flops * PREFILL_SHARE)


def room_bytes(model: Model, gpu: Gpu) -> float:
    """Of keys and values on the GPUs; 0 if the weights leave none."""
    return max(0.0, gpu.memory * MEMORY_SHARE - model.weight_bytes)


def decode_s(model: Model, gpu: Gpu, form: Form, *, batch: float, context: float) -> float:
    """Seconds of one decode step of a batch. A mixture of experts reads those of all its tokens."""
    weights = min(model.parameters, model.active * batch) * model.weight_bits / 8
    read = weights + batch * form.request_bytes(model, round(context))
    return read / (gpu.bandwidth * DECODE_SHARE)


def load_s(model: Model, gpu: Gpu, form: Form, *, tokens: float, is_far: bool) -> float:
    """Seconds to bring the keys and values of so many tokens to the GPUs."""
    return model.request_values(round(tokens)) * form.bits / 8 / (min(gpu.disk, gpu.link) if is_far else gpu.link)


def by_layer_s(load: float, compute: float, layers: int) -> float:
    """First token if layers are computed as they come: the slower of the two, and one layer of the
    other."""
    return max(load / layers + compute, load + compute / layers)
