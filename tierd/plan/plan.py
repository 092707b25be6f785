"""A plan: sizes of tiers, expected hits, time to first token, costs, and the drives' life.

Everything follows from a model, a GPU, traffic and sizes. Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from tierd.plan.kv import Form, Waste, form_of, waste_of
from tierd.plan.machines import Gpu, by_layer_s, decode_s, load_s, prefill_s, room_bytes
from tierd.plan.models import Model
from tierd.plan.traffic import Traffic

CODED = "rot-4-4"
"""INT4 of the table of costs."""
GIB, TIB = 1 << 30, 1 << 40
HOURS_PER_MONTH = 730.0
RATED_DAYS = 5 * 365.0
MOST_HOST, MOST_NVME = TIB, 32 * TIB
"""The largest tiers that are suggested."""
WORTH = 0.01
"""Hits that a larger tier has to add."""


class Hits(Protocol):
    """Of some traffic: shares of its prompt tokens."""

    def of(self, tokens: float) -> float:
        """Found in tiers that hold so many tokens together."""

    def split(self, host: int, nvme: int) -> tuple[float, float]:
        """Found in each of two tiers of so many bytes."""


@dataclass(frozen=True, slots=True)
class Asked:
    """gpu: all GPUs of an engine as one. gpus: how many they are. host, nvme: bytes; None: to be
    suggested. memory_price: dollars for a GiB a month; disk_price: for a TiB."""

    model: Model
    form: Form
    context: int
    concurrency: int
    traffic: Traffic
    gpu: Gpu
    gpus: int
    host: int | None = None
    nvme: int | None = None
    memory_price: float = 2.0
    disk_price: float = 30.0

    @property
    def token_bytes(self) -> float:
        """Of a stored token, mean over a prompt."""
        return self.form.request_bytes(self.model, round(self.traffic.prompt)) / self.traffic.prompt


class Tier(NamedTuple):
    """hits: share of prompt tokens that this tier serves."""

    name: str
    capacity_bytes: float
    hits: float


class FirstToken(NamedTuple):
    """seconds: to the first token of a mean prompt. is_worth: whether the advisor loads."""

    source: str
    reused_tokens: int
    seconds: float
    is_worth: bool


class Cost(NamedTuple):
    """batch: requests at a time. gpu_s: of a request. engines: for this traffic. dollars: of a
    million tokens, of the prompt and the answer alike."""

    name: str
    hits: float
    batch: int
    gpu_s: float
    engines: float
    dollars: float


@dataclass(frozen=True, slots=True)
class Plan:
    """kv_bytes_per_token: before windows. kv_bytes_per_request: of `context` tokens.

    drive_writes: of the NVMe tier's capacity a day, if every new block is written.
    life_years: of a drive rated for one a day over five years."""

    kv_bytes_per_token: float
    kv_bytes_per_request: float
    waste: Waste
    room_bytes: float
    fitting_requests: int
    tiers: list[Tier]
    first_token: list[FirstToken]
    costs: list[Cost]
    drive_writes: float = 0.0
    life_years: float = 0.0
    curve: list[tuple[float, float]] = field(default_factory=list)
    """(bytes, share): hits against the bytes of all tiers."""


def plan_of(asked: Asked, hits: Hits) -> Plan:
    """The plan. hits: of this traffic."""
    model, form, token_bytes = asked.model, asked.form, asked.token_bytes
    mean = asked.traffic.mean_tokens
    room, request = room_bytes(model, asked.gpu), form.request_bytes(model, round(mean))
    host = suggest(hits, token_bytes, 0, MOST_HOST) if asked.host is None else asked.host
    nvme = suggest(hits, token_bytes, host, MOST_NVME) if asked.nvme is None else asked.nvme
    tiers = [Tier(*one) for one in zip(("host", "nvme"), (host, nvme), hits.split(host, nvme), strict=True)]
    found = sum(tier.hits for tier in tiers)
    writes = asked.traffic.per_s * asked.traffic.prompt * (1 - found) * token_bytes * 86_400 / nvme if nvme else 0.0
    return Plan(
        form.token_bytes(model),
        form.request_bytes(model, asked.context),
        waste_of(model, context=asked.context, mean=mean),
        room,
        int(room // request),
        tiers,
        list(first_tokens(asked, found)),
        list(costs(asked, hits, host=host, nvme=nvme)),
        writes,
        RATED_DAYS / 365 / writes if writes else 0.0,
        [(size, hits.of(size / token_bytes)) for size in (GIB * 2.0**k for k in range(4, 16))],
    )


def suggest(hits: Hits, token_bytes: float, below: float, most: int) -> int:
    """The least power of two of bytes, from 16 GiB on, that is within WORTH of the largest one; 0 if
    that brings nothing beyond `below`."""
    sizes = [16 * GIB]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    shares = [hits.of((below + size) / token_bytes) for size in sizes]
    if shares[-1] - hits.of(below / token_bytes) < WORTH:
        return 0
    return next(size for size, share in zip(sizes, shares, strict=True) if shares[-1] - share < WORTH)


def first_tokens(asked: Asked, share: float) -> Iterator[FirstToken]:
    """A mean prompt whose reused share comes from each place."""
    model, prompt = asked.model, asked.traffic.prompt
    reused = int(share * prompt)
    alone = prefill_s(model, asked.gpu, 0, prompt)
    tail = prefill_s(model, asked.gpu, reused, prompt - reused)
    yield FirstToken("nowhere", 0, alone, is_worth=True)
    yield FirstToken("gpu", reused, tail, is_worth=True)
    layers = sum(layer.count for layer in model.layers)
    for source in ("host", "nvme"):
        load = load_s(model, asked.gpu, asked.form, tokens=reused, is_far=source == "nvme")
        seconds = by_layer_s(load, tail, layers)
        yield FirstToken(source, reused, seconds, is_worth=seconds < alone)


def costs(asked: Asked, hits: Hits, *, host: float, nvme: float) -> Iterator[Cost]:
    """Values of 16 bits and coded ones, without reuse, with host memory, with NVMe too."""
    plain, coded = form_of("bfloat16"), form_of(CODED)
    small, large = replace(asked, host=int(host), nvme=0), replace(asked, host=int(host), nvme=int(nvme))
    none = replace(asked, host=0, nvme=0)
    yield _cost("bfloat16", none, plain, hits)
    yield _cost("INT4", none, coded, hits)
    yield _cost("INT4, prefix reuse", small, coded, hits)
    yield _cost("INT4, prefix reuse, NVMe", large, coded, hits)


def _cost(name: str, asked: Asked, form: Form, hits: Hits) -> Cost:
    """Prompts and decode steps take turns on the GPUs. Loads overlap with others' work."""
    model, traffic, host, nvme = asked.model, asked.traffic, asked.host or 0, asked.nvme or 0
    request = form.request_bytes(model, round(traffic.mean_tokens))
    token_bytes = form.request_bytes(model, round(traffic.prompt)) / traffic.prompt
    share = hits.of((host + nvme) / token_bytes) if host + nvme else 0.0
    reused = share * traffic.prompt
    batch = max(1, min(asked.concurrency, int(room_bytes(model, asked.gpu) // request)))
    step = decode_s(model, asked.gpu, form, batch=batch, context=traffic.mean_tokens)
    gpu_s = prefill_s(model, asked.gpu, reused, traffic.prompt - reused) + traffic.output * step / batch
    engines = traffic.per_s * gpu_s
    hour = (
        asked.gpu.price * engines + (host / GIB * asked.memory_price + nvme / TIB * asked.disk_price) / HOURS_PER_MONTH
    )
    tokens = traffic.per_s * 3600 * (traffic.prompt + traffic.output)
    return Cost(name, share, batch, gpu_s, engines, hour / tokens * 1e6)
