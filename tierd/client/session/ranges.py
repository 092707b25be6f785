"""Pages of a GPU one behind the other at one address, for kernels that know no pages.

Purpose: `contiguous`. Non-purpose: how bytes lie within a block, which is its namespace's affair: the range is one tensor [blocks, ...] of whatever that is, and has a sequence's tokens
in a row only where a block has them outermost (one layer, latents of MLA, encoded images). Invariants: nothing is copied; the range is mapped for reading alone, whatever this process
may do at the pages' own addresses; it keeps them pinned; it is unmapped as a slab is, by a later call, when the GPU's work has ended.

So vAttention keeps a request's keys and values in a row of virtual addresses while their memory comes in pieces (arXiv 2405.04437, ASPLOS 2025, section 5). There a piece is made
for this; here it is a slab that others have mapped too. The driver maps what one cuMemCreate made, a slab, as a whole and from its beginning: the offset of cuMemMap "currently must be zero" (cuda.h 13.0). So
pages can follow each other where each fills a slab: a device tier whose `segment` is the bytes of a block, a multiple of the GPU's granularity. That suits large blocks: each slab takes a
descriptor and a catalogue, and the driver tens of microseconds to be mapped once more, so a range is made once for a sequence and not at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tierd.client.session.device import DevicePage, Gpu, Memory
from tierd.errors import InvalidArgument


def contiguous(pages: Sequence[Any]) -> DevicePage:
    """Pages, as views of a lease on a GPU, in this order as one read-only page. The last one may be shorter than its slab.

    It holds their pins: a lease is released when the range is gone too. It may wait for the GPU, and must not be made while this process captures a graph.
    Raises InvalidArgument for pages that cannot follow each other, with the remedy; Overloaded, TierFailed.
    """
    gpu = _checked(pages)
    gpu.unmap_ended()
    length = sum(page.nbytes for page in pages)
    memory = _joined(gpu, [page.memory for page in pages])
    return DevicePage(memory, memory.address, length, pin=tuple(pages), writable=False)


def _checked(pages: Sequence[Any]) -> Gpu:
    """The GPU that all of them lie on. Raises InvalidArgument."""
    if not len(pages):
        raise InvalidArgument("pages: there are none; give those of a lease")
    for i, page in enumerate(pages):
        if not isinstance(page, DevicePage):
            raise InvalidArgument(
                f'pages[{i}]: {type(page).__name__} is none of a GPU; acquire them with tier="device"'
            )
        if page.device is not pages[0].device:
            raise InvalidArgument(
                f"pages[{i}]: lies on GPU {page.device.id}, pages[0] on GPU {pages[0].device.id}; make a range for each GPU"
            )
        memory = page.memory
        if page.address != memory.address or (page.nbytes != memory.length_bytes and i < len(pages) - 1):
            is_tail = 0 < i == len(pages) - 1
            raise InvalidArgument(f"pages[{i}]: {_misfit(page, is_tail=is_tail)}")
    gpu: Gpu = pages[0].device
    return gpu


def _misfit(page: DevicePage, *, is_tail: bool) -> str:
    """Why nothing can follow it, or precede it, and what to do. is_tail: all others fit."""
    granularity = page.device.granularity
    if is_tail:
        remedy = "leave it out, and read it where it is"
    elif page.nbytes % granularity:
        remedy = "choose tokens_per_block so that a block's bytes are a multiple of that, and set the device tier's segment to them"
    else:
        remedy = f"set the device tier's segment to {page.nbytes} bytes"
    return (
        f"{page.nbytes} bytes at {page.address - page.memory.address} of a slab of {page.memory.length_bytes}; the driver maps slabs as a whole, "
        f"so each page must fill one, and the GPU's granularity is {granularity}: {remedy}"
    )


def _joined(gpu: Gpu, slabs: Sequence[Memory]) -> Memory:
    """Their memory once more, in a row. Raises Overloaded, TierFailed."""
    ask, length = gpu.ask, sum(slab.length_bytes for slab in slabs)
    with gpu.entered(), ExitStack() as failed:
        address = end = int(ask("cuMemAddressReserve", length, 0, 0, 0))
        failed.callback(ask, "cuMemAddressFree", address, length)
        for slab in slabs:
            handle = ask("cuMemRetainAllocationHandle", slab.address)
            try:
                ask("cuMemMap", end, slab.length_bytes, 0, handle, 0)
            finally:
                ask("cuMemRelease", handle)
            failed.callback(ask, "cuMemUnmap", end, slab.length_bytes)
            end += slab.length_bytes
        ask("cuMemSetAccess", address, length, [gpu.access(is_writable=False)], 1)
        failed.pop_all()
    return Memory(gpu, address, length)
