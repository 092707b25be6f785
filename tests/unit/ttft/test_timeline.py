"""The arithmetic of the time to first token: stages, waits, bounds, crossovers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import InvalidArgument
from tierd.ttft.bench import Learnt, Result, Series, Setup
from tierd.ttft.drawing import timeline_text
from tierd.ttft.engine import Measured
from tierd.ttft.machine import PRESETS, Machine, Shape
from tierd.ttft.report import BARS, Row, bar_of
from tierd.ttft.timeline import Job, Sizes, Source, Timeline, arrivals, bound, crossover, streamed

H100 = PRESETS["h100"]
SIZES = Sizes(32, 131072.0)
SLOW = Machine(55e9, 1e-5, 6e8, 1e-4, 5000.0, 1e5)
"""Reading a token takes about as long as computing it."""
NARROW = replace(H100, link_bytes_per_s=5e9, disk_bytes_per_s=5e9)
SECONDS = st.floats(0, 10)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Layers that arrive in order after the call, and are copied in order after that."""
    layers = draw(st.integers(1, 40))
    called = draw(SECONDS)
    waits = np.array(draw(st.lists(SECONDS, min_size=layers, max_size=layers)))
    arrived = called + np.cumsum(waits)
    return Timeline(called, arrived, streamed(arrived, draw(SECONDS)), draw(SECONDS))


@given(ready=st.lists(SECONDS, min_size=1, max_size=40), each_s=SECONDS)
def test_a_stage_handles_one_layer_after_another(ready: list[float], each_s: float) -> None:
    """Layer n ends at max(end of n - 1, ready of n) + the stage's time."""
    end, wanted = 0.0, []
    for at in ready:
        end = max(end, at) + each_s
        wanted.append(end)
    assert streamed(np.array(ready), each_s) == pytest.approx(wanted)


@given(line=timelines())
def test_waiting_and_computing_are_all_of_the_time(line: Timeline) -> None:
    """No wait is negative, and all waits with the computing make the time to first token."""
    stalls = line.stalls()
    parts = np.stack([stalls.call, stalls.disk, stalls.link])
    assert (parts >= -1e-9).all()
    assert parts.sum() + line.layer_s * len(line.copied) == pytest.approx(line.first_token_s)


def test_each_wait_has_its_cause() -> None:
    """Two layers arrive at 3 and 4 and are copied at 5 and 12, after a call that ends at 1."""
    stalls = Timeline(1.0, np.array([3.0, 4.0]), np.array([5.0, 12.0]), 2.0).stalls()
    assert (stalls.call.tolist(), stalls.disk.tolist(), stalls.link.tolist()) == ([1, 0], [2, 0], [2, 5])


@given(line=timelines())
def test_by_layer_is_never_later_than_whole(line: Timeline) -> None:
    """Computing beside the copies ends no later than after them, and saves less than the computing."""
    whole = line.as_whole().first_token_s
    assert whole == pytest.approx(line.copied[-1] + line.layer_s * len(line.copied))
    assert line.first_token_s <= whole + 1e-9
    assert whole - line.first_token_s <= line.layer_s * (len(line.copied) - 1) + 1e-9


@given(layers=st.integers(1, 80), parts=st.integers(1, 80), size=st.floats(1, 1e12))
def test_parts_arrive_in_order_and_never_before_their_layers(layers: int, parts: int, size: float) -> None:
    """Fewer parts bring no layer earlier than one by one, and the last one at the same time."""
    alone = arrivals(size, H100, stops=range(1, layers + 1))
    stops = np.unique(layers * np.arange(1, parts + 1) // parts)
    some = arrivals(size, H100, stops=stops[stops > 0].tolist())
    assert (np.diff(some) >= 0).all()
    assert (some >= alone - 1e-12).all()
    assert some[-1] == pytest.approx(alone[-1])
    assert len(np.unique(some)) == min(parts, layers)


@given(prefix=st.integers(1, 1 << 16), tail=st.integers(1, 1 << 16), parts=st.integers(1, 32))
def test_a_farther_source_is_never_faster(prefix: int, tail: int, parts: int) -> None:
    """Device, host, NVMe, NVMe in fewer reads: each bound is at least the one before."""
    job = Job(prefix, tail, prefix)
    times = [
        bound(job, source, H100, sizes=SIZES).first_token_s for source in (Source.DEVICE, Source.HOST, Source.NVME)
    ]
    times.append(
        bound(job, Source.NVME, H100, sizes=SIZES, stops=[32 * (i + 1) // parts for i in range(parts)]).first_token_s
    )
    assert (np.diff(times) >= -1e-12).all()
    assert times[-1] >= prefix * SIZES.token_bytes / H100.disk_bytes_per_s


@given(start=st.integers(0, 1 << 17), tokens=st.integers(0, 1 << 17), more=st.integers(0, 1 << 17))
def test_prefill_in_two_steps_takes_as_long_as_in_one(start: int, tokens: int, more: int) -> None:
    """The rate depends on the context alone."""
    both = H100.prefill_s(start, tokens) + H100.prefill_s(start + tokens, more)
    assert both == pytest.approx(H100.prefill_s(start, tokens + more))


def test_the_rate_is_half_at_the_half_context() -> None:
    """After `half_context` tokens a token takes twice as long as the first."""
    machine = Machine(1.0, 0.0, 1.0, 0.0, 1000.0, 50_000.0)
    assert machine.prefill_s(50_000, 1e-3) == pytest.approx(2 * machine.prefill_s(0, 1e-3))


@pytest.mark.parametrize("scale", [1, 2, 16, 1024])
def test_scaling_keeps_times_and_blocks(scale: int) -> None:
    """Bytes over bandwidth and the bytes of a block are those of the machine that is stood for."""
    small, machine = Shape().scaled(scale), H100.scaled(scale)
    assert small.block_bytes == Shape().block_bytes
    assert small.token_bytes / machine.link_bytes_per_s == Shape().token_bytes / H100.link_bytes_per_s
    assert small.token_bytes / machine.disk_bytes_per_s == Shape().token_bytes / H100.disk_bytes_per_s
    assert small.geometry.head_dim * small.geometry.kv_heads * scale == 1024


def test_a_scale_that_does_not_divide_is_refused() -> None:
    """A scale must divide the channels of a layer."""
    with pytest.raises(InvalidArgument, match="--scale: 3 does not divide the 1024 channels"):
        Shape().scaled(3)


def test_the_crossover_lies_between_the_measured_prefixes() -> None:
    """Of times that are powers of the length, it is where the curves meet."""
    prefixes = [1024, 4096, 16384]
    computed = [1e-6 * prefix**1.5 for prefix in prefixes]
    loaded = [1e-6 * 2048**0.5 * prefix for prefix in prefixes]
    assert crossover(prefixes, loaded, computed) == pytest.approx(2048)
    assert crossover(prefixes, [0.0001] * 3, computed) == 0
    assert crossover(prefixes, [9.0] * 3, computed) is None


def setup(**changes: object) -> Setup:
    """Prefixes of 1 K and 8 K, scaled 32 times."""
    return Setup(**({"machine": H100, "shape": Shape(), "scale": 32, "prefixes": (1024, 8192)} | changes))  # type: ignore[arg-type]


def test_the_advised_bound_is_the_best_of_all_splits() -> None:
    """With a slow disk, loading some blocks beats loading all and none."""
    small = setup(machine=SLOW)
    advised = small.bound_s(Series(Source.NVME, "advised"), 8192)
    assert advised < 0.9 * min(
        small.bound_s(Series(Source.NVME, "by layer"), 8192), small.bound_s(Series(Source.NOWHERE), 8192)
    )


def test_the_advisor_knows_that_layers_come_beside_computing() -> None:
    """If all of a load takes as long as computing, a part of it is loaded, and beats both."""
    mine, learnt = setup(machine=SLOW), Learnt()
    for prefix in (1024, 2048, 4096, 8192):
        for series in (Series(Source.NVME, "whole"), Series(Source.NOWHERE)):
            job = mine.job(prefix, 0 if series.source is Source.NOWHERE else prefix)
            line = bound(job, series.source, SLOW, sizes=SIZES)
            line = line.as_whole() if series.how else line
            size = int(job.loaded * SIZES.token_bytes)
            learnt.observe(job, series, Measured(line, line.first_token_s), size=size, layers=SIZES.layers)
    loaded = learnt.tokens(mine.job(8192, 8192), Source.NVME, mine.shape)
    none, some, every = (
        bound(mine.job(8192, count), Source.NVME, SLOW, sizes=SIZES).first_token_s for count in (0, loaded, 8192)
    )
    assert some < 0.9 * min(none, every)


@pytest.mark.parametrize(
    ("machine", "beyond", "verdict"),
    [(H100, -1e-6, "kept"), (H100, 1e-3, "broken"), (NARROW, 1e-3, "arithmetic forbids it")],
)
@pytest.mark.parametrize("source", BARS)
def test_a_bar_is_kept_broken_or_impossible(source: Source, machine: Machine, beyond: float, verdict: str) -> None:
    """A load is judged by the share that it adds to the device's time, and by what arithmetic allows."""
    mine, far = setup(machine=machine), Series(source, "by layer")
    none, near_s = np.zeros(32), mine.bound_s(Series(Source.DEVICE), 8192)
    added = BARS[source] + beyond
    results = [
        Result(series, 8192, 8192, Measured(Timeline(0.0, none, none, near_s / 32), seconds))
        for series, seconds in ((Series(Source.DEVICE), near_s), (far, near_s * (1 + added)))
    ]
    bar = bar_of(mine, results, source, 8192)
    assert bar["added"] == pytest.approx(added)
    assert bar["verdict"] == verdict


def test_the_tail_is_its_share_of_the_prompt() -> None:
    """Of a prompt with a tail of a quarter, three quarters are prefix."""
    job = setup(tail=0.25).job(8192, 8192)
    assert job.tail == pytest.approx((job.prefix + job.tail) / 4, abs=1)


@pytest.mark.parametrize(
    ("changes", "memory_bytes", "limit_s", "said"),
    [
        ({"prefixes": (1000,)}, 1 << 30, 60, "--prefix: 1000 tokens are no whole blocks of 512"),
        ({"prefixes": (1 << 16,)}, 1 << 28, 60, "need 512 MiB of the 256 MiB allowed"),
        ({"runs": 1000}, 1 << 30, 60, "--runs: 1000 take about .* of the 60 s allowed"),
    ],
)
def test_what_exceeds_its_limits_is_refused(
    changes: dict[str, object], memory_bytes: int, limit_s: float, said: str
) -> None:
    """Partial blocks, too much memory and too long a time are refused before anything runs."""
    with pytest.raises(InvalidArgument, match=said):
        setup(**changes).checked(memory_bytes=memory_bytes, limit_s=limit_s)


def test_a_timeline_shows_what_took_most_of_each_column() -> None:
    """One second each: call, disk, link and computing, in eight columns."""
    row = Row(first_token_s=4.0, layers=[[1.0, 1.0, 1.0, 0.5], [0.0, 0.0, 0.0, 0.5]])  # type: ignore[typeddict-item]
    assert timeline_text(row, width=8, longest_s=4.0) == "??nn--##"
