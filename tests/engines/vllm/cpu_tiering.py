"""vLLM's tiered offloading on the CPU: `CpuTiering` is the spec_name, this module spec_module_path.

Purpose: upstream offloads from CUDA and XPU only. Here copies between tensors replace its kernels.
Everything above them (scheduler, host tier, secondary tiers) is vLLM's own. Non-purpose: speed. For
tests only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class Layer(NamedTuple):
    """kv: a tensor of the engine, blocks first. rows: its part of each chunk's row. bytes: of a block."""

    kv: torch.Tensor
    rows: torch.Tensor
    bytes: int


class CpuCopies(OffloadingWorker):
    """Copies at once; a submitted transfer is already finished."""

    def __init__(self, caches: Any, region: SharedOffloadRegion, *, blocks_per_chunk: int) -> None:
        self._region, self._blocks_per_chunk = region, blocks_per_chunk
        self._layers = [
            Layer(
                one.tensor, region.create_next_worker_view(one.page_size_bytes * blocks_per_chunk), one.page_size_bytes
            )
            for one in caches.tensors
        ]
        self._groups = [{ref.tensor_idx for ref in refs} for refs in caches.group_data_refs]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src: Any, dst: Any) -> bool:
        return self._copy(job_id, src, dst, is_store=True)

    def submit_load(self, job_id: int, src: Any, dst: Any) -> bool:
        return self._copy(job_id, dst, src, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: Any) -> None:
        """Returns at once: no transfer is pending."""

    def shutdown(self) -> None:
        self._layers.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, gpu: Any, cpu: Any, *, is_store: bool) -> bool:
        began, count = time.perf_counter(), 0
        for group, block, chunk, part in self._pairs(gpu, cpu):
            for layer in (self._layers[i] for i in self._groups[group]):
                kv = layer.kv[block].reshape(-1).view(torch.int8)
                row = layer.rows[chunk, part * layer.bytes :][: kv.numel()]
                row.copy_(kv) if is_store else kv.copy_(row)
                count += kv.numel()
        self._done.append(TransferResult(job_id, True, count, time.perf_counter() - began))
        return True

    def _pairs(self, gpu: Any, cpu: Any) -> Iterator[tuple[int, int, int, int]]:
        """(group, block, chunk, part of the chunk) of a transfer; each group's blocks begin a new chunk."""
        blocks, chunks = iter(gpu.block_ids.tolist()), cpu.chunk_ids.tolist()
        base, size = 0, self._blocks_per_chunk
        for group, count in enumerate(gpu.group_sizes):
            first = gpu.block_indices[group] % size
            for i in range(first, first + count):
                yield group, next(blocks), int(chunks[base + i // size]), i % size
            base += -(-(first + count) // size) if count else 0


class CpuTiering(TieringOffloadingSpec):
    """vLLM's spec with CpuCopies as its worker."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuCopies(kv_caches, region, blocks_per_chunk=self.blocks_per_chunk)
        return self._worker
