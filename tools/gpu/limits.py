"""The machine's limits: the tensor cores' rate, and the memory's bandwidth. The latter is by the
datasheet's clock and width, by a kernel that only reads, and by copies."""

from __future__ import annotations

from tools.gpu.device import DeviceArray, Gpu, Room
from tools.gpu.shapes import Reader

ROUNDS = 5
FLOPS_OF_A_CLOCK = {8: 2048, 9: 4096, 10: 8192, 12: 1024}
"""Dense bf16 of one multiprocessor, by the major number of its architecture."""


def find_datasheet(gpu: Gpu) -> float | None:
    """Bytes a second of its memory: both edges of the clock. None if the driver reports none."""
    clock_khz, width_bits = gpu.find_attribute("MEMORY_CLOCK_RATE"), gpu.find_attribute("GLOBAL_MEMORY_BUS_WIDTH")
    return 2e3 * clock_khz * width_bits / 8 if clock_khz and width_bits else None


def find_flops(gpu: Gpu) -> float | None:
    """Of bf16 in a second at the highest clock."""
    clock_khz = gpu.find_attribute("CLOCK_RATE")
    each = FLOPS_OF_A_CLOCK.get(gpu.find_attribute("COMPUTE_CAPABILITY_MAJOR") or 0)
    return 1e3 * clock_khz * each * gpu.multiprocessors if clock_khz and each else None


def read_rates(gpu: Gpu, room: Room, memory: DeviceArray, length_bytes: int) -> list[float]:
    """Bytes a second of a kernel that only reads this many."""
    length = min(length_bytes, memory.nbytes)
    seconds = gpu.times(Reader(gpu, room).runs(memory, length), rounds=ROUNDS)
    return [length / each for each in seconds]


def copy_rates(gpu: Gpu, memory: DeviceArray, length_bytes: int) -> list[float]:
    """Bytes read and written a second by the driver's copies between the halves of this memory."""
    half = memory.nbytes // 2
    length = min(length_bytes // 2, half)
    places = [memory.address + i * length for i in range(max(1, min(4, half // length)))]
    works = [lambda at=at: gpu.ask("cuMemcpyDtoDAsync", at + half, at, length, gpu.stream) for at in places]
    return [2 * length / each for each in gpu.times(works, rounds=ROUNDS, as_graphs=False)]
