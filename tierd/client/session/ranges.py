"""Maps GPU pages at adjacent addresses, for kernels that need contiguous memory.

`contiguous` makes one tensor [blocks, ...]. The layout inside a block belongs to its namespace. So
a sequence's tokens are contiguous only if the block has them outermost (one layer, latents of MLA,
encoded images). Nothing is copied. The range is read-only, also if this process may write to the
pages. It keeps the pages pinned. When the GPU's work is done, a later call unmaps it.

vAttention makes a request's keys and values virtually contiguous too, while memory comes in pieces
(arXiv 2405.04437, ASPLOS 2025, section 5). It creates a piece for this purpose; here a piece is a
slab that other processes map too. The driver maps a slab, made by one cuMemCreate, only as a whole:
the offset of cuMemMap "currently must be zero" (cuda.h 13.0). So each page must fill a slab. The
device tier's `segment` must be the bytes of a block, a multiple of the GPU's granularity. This
suits large blocks: each slab takes a descriptor and a catalogue, and mapping it again takes the
driver tens of microseconds. So make a range once for a sequence, not at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tierd.client.session.device import DevicePage, Gpu, Memory
from tierd.errors import InvalidArgument


def contiguous(pages: Sequence[Any]) -> DevicePage:
    """Maps pages, views of a lease on a GPU, in this order as one read-only page.

    The last one may be shorter than its slab. The range keeps the pages pinned: the lease is
    released only when the range is gone too. The call may wait for the GPU. Do not make it while
    this process captures a CUDA graph. Raises InvalidArgument, with the remedy, for pages that
    cannot be adjacent; Overloaded, TierFailed.
    """
    gpu = _checked(pages)
    gpu.unmap_ended()
    length = sum(page.nbytes for page in pages)
    memory = _joined(gpu, [page.memory for page in pages])
    return DevicePage(memory, memory.address, length, pin=tuple(pages), writable=False)


def _checked(pages: Sequence[Any]) -> Gpu:
    """The GPU that holds all pages. Raises InvalidArgument."""
    if not len(pages):
        raise InvalidArgument("pages: there are none; give those of a lease")
    for i, page in enumerate(pages):
        if not isinstance(page, DevicePage):
            raise InvalidArgument(
                f'pages[{i}]: {type(page).__name__} is not on a GPU; acquire pages with tier="device"'
            )
        if page.device is not pages[0].device:
            raise InvalidArgument(
                f"pages[{i}]: is on GPU {page.device.id}, pages[0] on GPU {pages[0].device.id}; make a range per GPU"
            )
        memory = page.memory
        if page.address != memory.address or (page.nbytes != memory.length_bytes and i < len(pages) - 1):
            is_tail = 0 < i == len(pages) - 1
            raise InvalidArgument(f"pages[{i}]: {_misfit(page, is_tail=is_tail)}")
    gpu: Gpu = pages[0].device
    return gpu


def _misfit(page: DevicePage, *, is_tail: bool) -> str:
    """Why no page can follow or precede this one, and the remedy. is_tail: all others fit."""
    granularity = page.device.granularity
    if is_tail:
        remedy = "omit it, and read it in place"
    elif page.nbytes % granularity:
        remedy = (
            "choose tokens_per_block so that a block is a multiple of that, and set the device tier's segment to it"
        )
    else:
        remedy = f"set the device tier's segment to {page.nbytes} bytes"
    return (
        f"{page.nbytes} bytes at {page.address - page.memory.address} of a slab of {page.memory.length_bytes}; the driver maps slabs as a whole, "
        f"so each page must fill one, and the GPU's granularity is {granularity}: {remedy}"
    )


def _joined(gpu: Gpu, slabs: Sequence[Memory]) -> Memory:
    """Maps the slabs again, at adjacent addresses. Raises Overloaded, TierFailed."""
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
