"""A captured graph of a sparse decode step on the fake driver, replayed over a growing context."""

from __future__ import annotations

import time

import numpy as np

from tests.unit.kernels.fake_driver import on_fake_driver
from tierd.kernels import granules
from tierd.kernels.granules import GRANULE_TOKENS, HotBuffer
from tierd.kernels.reference import PagedBatch, paged_attention
from tools.fake_cuda import build_fatbins
from tools.gpu import host
from tools.gpu.bench import Bench
from tools.gpu.device import BF16
from tools.gpu.sparse import SLOTS, Layer

COUNT, LIMIT_S = 40, 100


@on_fake_driver()
def test_a_captured_step_is_right_at_each_replay() -> None:
    """No replay needs the host: choices, misses and attention follow the counts and queries in the arrays."""
    bench = Bench(build_fatbins(), time.monotonic() + LIMIT_S, is_small=True)
    gpu, rng = bench.gpu(), np.random.default_rng(17)
    with gpu.room() as room, host.pinned(gpu, 8 << 20) as memory:
        memory.bytes.view(BF16)[:] = rng.standard_normal(memory.bytes.nbytes // 2).astype(BF16)
        layer = Layer(bench, gpu, room, memory, COUNT * GRANULE_TOKENS)
        limits = gpu.read_back(layer.bounds)[:COUNT].astype(np.float32)
        places = (gpu.read_back(layer.source.addresses)[0] - np.uint64(memory.address)).astype(np.int64)
        heads, dim = layer.heads, limits.shape[3]
        blocks = [memory.bytes[first:][: heads * GRANULE_TOKENS * dim * 2].view(BF16) for first in places.flat]
        pages = np.array(blocks).reshape(COUNT, 2, heads, GRANULE_TOKENS, dim).swapaxes(2, 3).astype(np.float64)
        hot, hits = HotBuffer(heads, COUNT, SLOTS), 0
        graph = gpu.captured(lambda: layer.attend(0))
        q = rng.standard_normal(layer.q[0].shape)
        for count in (1, 2, 5, COUNT, COUNT):
            q = (q + 0.2 * rng.standard_normal(q.shape)).astype(BF16)
            gpu.write(layer.contexts[0].counts, np.array([count], np.int32))
            gpu.write(layer.q[0], q)
            gpu.ask("cuGraphLaunch", graph, gpu.stream)
            chosen = granules.choose(granules.scores(q[0], limits[:count]), 3)
            np.testing.assert_array_equal(gpu.read_back(layer.chosen.ids)[0, :, : chosen.shape[1]], chosen)
            found = hot.resolve(chosen)
            np.testing.assert_array_equal(gpu.read_back(layer.resolved.miss_sizes)[0], found.is_miss.sum(axis=1))
            np.testing.assert_array_equal(gpu.read_back(layer.state.owners)[0], hot.owners)
            hits += int((~found.is_miss).sum())
            batch = PagedBatch([0, 1], [count * GRANULE_TOKENS], [range(count)], subsets=[chosen.tolist()])
            want = paged_attention(q.astype(np.float64), pages, batch).out
            assert np.linalg.norm(gpu.read_back(layer.parts[2].out) - want) <= 4e-3 * np.linalg.norm(want)
        assert hits
