"""The forecast of each result, written before any run, and the promises.

Purpose: one entry for each name that a part may give, in the order of a report; `verdict`.
Non-purpose: measuring. Sources: an H100 or H200 of 132 multiprocessors, on which a copy moves nine
tenths of the datasheet's bandwidth; PCIe 5 with 50 to 55 GB/s. A decode issues 526 instructions per
tile of 8 KiB, a quarter of the slots in that time. Published: copies in pieces (vLLM #42212);
prefill by mma.sync (FlashAttention-3, section 4). For prefill cuda/README.md has the arithmetic.
Copies, stores and merges move 16 bytes a thread at a time. A store's block ends after one turn, so
the memory idles. Bounds of keys read two bytes at a time, far below bandwidth. Invariants:
`predicted` is of the ratio if a row has a limit, else of the value. Issue and design name the
promises: missing one is a failure, and missing a prediction is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tools.gpu.results import Check, Fact, Left, Result, Row


@dataclass(frozen=True, slots=True)
class Forecast:
    """predicted: a number for a row, words for a fact or check. at_least, at_most: promised bounds."""

    part: str
    name: str
    predicted: float | str
    meaning: str
    at_least: float | None = None
    at_most: float | None = None


RIGHT = "right"
DECODE_SIZES = {
    "1x128k": "one request of 128 K tokens",
    "4x32k": "4 of 32 K",
    "16x8k": "16 of 8 K",
    "17x8k": "17 of 8 K: as many rows as multiprocessors and a few more",
    "32x4k": "32 of 4 K",
    "128x2k": "128 of 2 K",
    "ragged": "32 requests of 256 to 64 K tokens, log-uniform",
}
SMALL_SIZES = {"1x1k": "one request of 1 K", "1x8k": "one of 8 K", "8x1k": "8 of 1 K", "64x256": "64 of 256"}
"""Their keys and values are smaller than 256 MB: other projects' kernels are their limit."""
MODELS = {"8b": "Llama-3-8B", "70b": "Llama-3-70B"}


def _probes() -> Iterator[Forecast]:
    part = "register"
    yield Forecast(
        part, "read_only_attribute", "yes", "the driver says that it registers host memory that may only be read"
    )
    yield Forecast(
        part,
        "read_only_register",
        "registered",
        "a mapping of a descriptor that was opened for reading, with the flag for it",
    )
    yield Forecast(part, "read_only_register_unflagged", "refused", "the same without the flag")
    yield Forecast(part, "register_writable", 10.0, "registration of 1 GiB that may be written: GiB a second")
    yield Forecast(part, "register_read_only", 1.0, "the same of a read-only mapping, against it")
    yield Forecast(part, "h2d_from_read_only", 1.0, "copies to the device from it, against those from the writable one")
    yield Forecast(part, "read_only_bytes", RIGHT, "what these copies brought")
    part = "deaths"
    yield Forecast(
        part,
        "late_host_writes",
        0.0,
        "kills after whose pidfd host memory still changed, of all in mid-copy",
        at_most=0.0,
    )
    yield Forecast(part, "late_slab_writes", 0.0, "the same of a slab that the parent has mapped too", at_most=0.0)
    yield Forecast(part, "host_kills", 15.0, "clients killed while their copies to the host were under way")
    yield Forecast(part, "slab_kills", 15.0, "clients killed while their copies into a slab were under way")
    yield Forecast(part, "kill_to_pidfd", 150.0, "the longest from a kill to its pidfd, ms")
    yield Forecast(
        part, "last_change_to_pidfd", 100.0, "the shortest time from the last byte that changed to the pidfd, ms"
    )
    yield Forecast(
        "bounds", "launch_bounds", RIGHT, "MAX_THREADS_PER_BLOCK of each kernel is the launch bound of its source"
    )
    yield Forecast("bounds", "resident_blocks", 2.0, "decode of head dim 128: blocks of a multiprocessor at a time")


def _correctness() -> Iterator[Forecast]:
    for name, meaning in {
        "decode_types": "decode of every type and head dim, page masses too",
        "decode_groups": "decode of 1 to 16 query heads for a kv head",
        "decode_pages": "decode of pages of 16 to 256 tokens",
        "decode_blocks": "decode by any number of blocks",
        "decode_windows": "windows with sinks, and chosen pages",
        "decode_long": "ragged batches of up to 20,000 tokens",
        "decode_odd": "NaN, infinities and numbers beyond fp16 in keys, values and queries: NaN comes out, and never that nothing was seen",
        "decode_narrow": "decode with the 99 KiB that a block of sm_86, 89 and 120 has, and by a ring of two tiles",
    }.items():
        yield Forecast("decodes", name, RIGHT, meaning)
    told = "nearly equal weights of 20,000 tokens: relative L2 from float64"
    yield Forecast("decodes", "decode_flat", 1.7e-3, told, at_most=2e-3)
    for name, meaning in {
        "prefill_types": "prefill of every type and head dim",
        "prefill_groups": "prefill of groups, windows with sinks, and chosen pages",
        "prefill_long": "chunks of up to 1,000 tokens behind up to 3,000",
        "prefill_odd": "the same of chunks; and chunks longer than was said, whose rows beyond are NaN",
        "prefill_narrow": "prefill with 99 KiB",
        "merge": "parts by their log-sum-exps",
    }.items():
        yield Forecast("prefills", name, RIGHT, meaning)
    for name, meaning in {
        "store": "new tokens into pages, to the bit",
        "copy": "pages between every two layouts, to the bit",
        "copy_mapped": "pages from and to mapped host memory, to the bit",
        "summary": "bounds of keys, to the bit",
        "sums": "checksums of slices, to the bit",
        "read": "the words that the reading kernel of the benchmarks saw",
    }.items():
        yield Forecast("pages", name, RIGHT, meaning)


def _decode() -> Iterator[Forecast]:
    part = "decode"
    yield Forecast(part, "read_bandwidth", 0.92, "a kernel that only reads, against the datasheet's clock and width")
    yield Forecast(part, "copy_bandwidth", 0.90, "device to device, bytes read and written, against the same")
    expected = {"1x128k": 0.91, "4x32k": 0.91, "16x8k": 0.91, "17x8k": 0.91, "32x4k": 0.90, "128x2k": 0.90}
    for size, meaning in DECODE_SIZES.items():
        for model, full in MODELS.items():
            told = f"{full}: {meaning}, against reading as many bytes"
            yield Forecast(part, f"decode_{model}_{size}", expected.get(size, 0.90), told, at_least=0.88)
    yield Forecast(
        part,
        "decode_one_head",
        0.65,
        "one request of 128 K tokens on one of eight GPUs that share Llama-3-70B: one kv head, 64 MiB (a row of later, whose prediction is not blind)",
    )
    yield Forecast(part, "decode_e4m3", 0.80, "Llama-3-70B in e4m3, 32 of 8 K", at_least=0.88)
    yield Forecast(
        part, "decode_whole_blocks", 0.90, "Llama-3-8B, 32 of 4 K in blocks of all layers, 2 MiB apart", at_least=0.88
    )
    for size in ("1x128k", "128x2k"):
        yield Forecast(
            part, f"mass_{size}", 1.01, f"Llama-3-8B, {size}: time with page masses over that without", at_most=1.02
        )
    yield Forecast(part, "decode_right", RIGHT, "samples of these outputs against float64")


def _others() -> Iterator[Forecast]:
    part = "kernels"
    for name, ratio, meaning in (
        ("prefill_8192", 0.24, "a prompt of 8,192 tokens, Llama-3-8B, against the datasheet's tensor cores"),
        ("prefill_512_8k", 0.19, "512 tokens behind 8 K"),
        ("prefill_512_32k", 0.20, "512 tokens behind 32 K"),
    ):
        yield Forecast(part, name, ratio, meaning)
    near = 0.8
    yield Forecast(part, "store_tokens", 0.65, "new tokens into random slots, against copy bandwidth", at_least=near)
    yield Forecast(
        part,
        "gather_pages",
        0.85,
        "random pages of all layers into engine tensors, against copy bandwidth",
        at_least=near,
    )
    yield Forecast(part, "merge_parts", 0.85, "8 parts in f32, against copy bandwidth", at_least=near)
    # On an H100, 64 of 8 K read 2.1 GB apart, in part from the L2 cache: 450 us. Together they read
    # 34 MB; the chunks' 9 GFlop at 120 TFLOP/s, the merge and two more launches take 110 us. A prefix
    # of 32 K does not fit that cache: 745 us against as many. Prefill's rate was known before.
    for name, ratio, meaning in (
        ("shared_64x8k", 0.25, "64 sequences with 8 K tokens in common"),
        ("shared_16x32k", 0.15, "16 with 32 K"),
    ):
        told = f"Llama-3-8B, {meaning}: time with these read once over that with them read by each"
        yield Forecast(part, name, ratio, told, at_most=0.9)
    yield Forecast(part, "shared_right", RIGHT, "both ways give the same outputs, except for rounding")
    yield Forecast(part, "summary_keys", 0.50, "bounds of keys, against read bandwidth")
    yield Forecast(part, "sums_slices", 0.80, "checksums of slices of 64 KiB, against read bandwidth")
    part = "graphs"
    yield Forecast(part, "graph_replays", RIGHT, "one capture of a decode, replayed at growing lengths")
    yield Forecast(part, "graph_replay", 12.0, "a replayed decode of 8 requests of 1 K, us on the device")
    yield Forecast(part, "decode_call", 150.0, "a decode by its Python face, us of the caller's time")
    yield Forecast(part, "graph_launch", 8.0, "the same by its graph, us of the caller's time")


def _link() -> Iterator[Forecast]:
    part = "link"
    for way, limit in (("h2d", 52.0), ("d2h", 50.0)):
        yield Forecast(part, f"{way}_link", limit, "one copy of registered memory as long as all pieces: GB/s")
        for piece, ratio in (("2m", 0.98), ("256k", 0.95), ("64k", 0.90), ("16k", 0.15)):
            promise = 0.9 if piece == "2m" else None
            told = f"pieces of {piece.upper()}iB in one batch, scattered on both sides, against the link"
            yield Forecast(part, f"{way}_batch_{piece}", ratio, told, at_least=promise)
        yield Forecast(
            part, f"{way}_gather_16k", 0.90, "pieces of 16 KiB by a kernel on mapped memory, against the link"
        )
        told = "the same by the kernel of the GPU process, which is told their addresses"
        yield Forecast(part, f"{way}_runs_16k", 0.90, told)
        told = "pieces of 16 KiB of which 16 adjoin, joined as the GPU process does, in one batch"
        yield Forecast(part, f"{way}_joined_16k", 0.95, told)
    yield Forecast(part, "both_ways", 1.6, "batches of 2 MiB pages both ways at once, against one way")
    yield Forecast(part, "batch_bytes", RIGHT, "what these batches brought")
    yield Forecast(part, "runs_bytes", RIGHT, "what the kernel of the GPU process brought")


def _together() -> Iterator[Forecast]:
    part = "process"
    told = "exports vmm; hashes kernel; no notice"
    yield Forecast(part, "process_facts", told, "what the device tier's GPU process found")
    yield Forecast(part, "process_bytes", RIGHT, "blocks of 2 MiB loaded, summed and stored by it")
    yield Forecast(part, "process_load", 0.80, "loads with checksums, against the link")
    yield Forecast(part, "process_store", 0.90, "stores, against the link")
    yield Forecast(part, "process_sums", 2.0, "checksums of what lies on the GPU, against the link from it")
    yield Forecast(part, "process_death", RIGHT, "it is killed, and its successor takes over the slab")
    part = "sharing"
    for name, meaning in {
        "shared_read_only": "a slab of another process, mapped for reading alone",
        "shared_same_bits": "several processes attend to the same pages, and get the same bits",
        "shared_survivor": "one is killed, the others go on with the same bits",
        "shared_owner_death": "the owner is killed: the mappings live, and its memory can be imported again",
        "shared_in_a_row": "the slab mapped twice more, one behind the other: a kernel reads across the seam",
        "shared_write_fault": "who writes to a page mapped for reading loses its own context, and nobody else's",
    }.items():
        yield Forecast(part, name, RIGHT, meaning)
    yield Forecast(part, "shared_pace", 1.0, "decodes a second of three processes after a kill, against before")
    told = "how a read from a disk came to a slab, by cuFile's own counts"
    yield Forecast("direct", "direct_read", "a detour: no libcufile", told)
    told = "where that is direct: blocks of 2 MiB read from a disk into a slab, with their checksums, against the way by host memory"
    yield Forecast("direct", "direct_rate", 1.1, told)
    # Each read by kvikio waits for the default stream, and goes through one more layer: some us of 1 ms.
    yield Forecast(
        "direct", "kvikio_rate", 0.98, "the same by kvikio, if it is installed, against tierd's own bindings"
    )
    part = "rivals"
    yield Forecast(
        part, "arrays_torch", RIGHT, "tensors of torch, stored to registered pages and loaded, in one stream"
    )
    yield Forecast(part, "arrays_cupy", RIGHT, "the same with arrays of cupy, if it is installed")
    yield Forecast(part, "arrays_load", 0.95, "loads of 256 MiB to scattered tensors of 2 MiB, against one copy")
    yield Forecast(part, "sdpa", "there or not", "torch's SDPA on gathered keys and values")
    yield Forecast(part, "flashinfer", "there or not", "FlashInfer's paged decode on the same pages")
    for rival, ratios in (("sdpa", (0.8, 0.3, 0.8, 0.9)), ("flashinfer", (0.9, 0.9, 1.0, 1.0))):
        for (size, meaning), ratio in zip(SMALL_SIZES.items(), ratios, strict=True):
            told = f"Llama-3-8B, {meaning}: our time over that of {rival}"
            yield Forecast(part, f"{rival}_{size}", ratio, told, at_most=1.05)
        for size in ("1x128k", "128x2k"):
            yield Forecast(part, f"{rival}_{size}", 0.95, f"Llama-3-8B, {size}: our time over that of {rival}")

    # FlashAttention-3 was published with 500 TFLOP/s for this shape, FlashInfer with 400; ours has 117.
    for rival, ratio in (("fa3", 4.2), ("flashinfer", 3.4)):
        told = (
            f"a prompt of 8,192 tokens, Llama-3-8B: our time over that of {rival}, which the worker uses if it is there"
        )
        yield Forecast(part, f"prefill_{rival}", ratio, told)


def _rotated() -> Iterator[Forecast]:
    """A tile takes some 490 instructions of a warp (sm_90), of which its place takes 230. All of 128 K
    tokens take 36 us, their bytes 46 (rot-4-4) or 91 (rot-8-8). Encoding takes 62 instructions a
    value, since three steps are tried; decoding 30."""
    part = "rotated"
    yield Forecast(part, "rot_blocks", RIGHT, "blocks of every codec and head dim, encoded and decoded, to the bit")
    yield Forecast(part, "rot_attention", RIGHT, "decodes of coded pages, against float64 over what they decode to")
    for kind, ratios in (("rot44", (0.70, 0.70)), ("rot84", (0.78, 0.78)), ("rot88", (0.84, 0.84))):
        for (size, meaning), ratio in zip(
            (("1x128k", "one request of 128 K"), ("32x4k", "32 of 4 K")), ratios, strict=True
        ):
            told = f"Llama-3-8B in {kind}: {meaning}, against reading as many bytes"
            yield Forecast(part, f"decode_{kind}_{size}", ratio, told, at_least=0.80 if size == "1x128k" else None)
    yield Forecast(part, "rot_encode", 0.27, "blocks of 2 MiB to rot-4-4, bytes read and written against copies")
    yield Forecast(part, "rot_decode", 0.45, "the same back")
    yield Forecast(part, "process_coded", RIGHT, "blocks that the GPU process stored and loaded as rot-4-4")
    yield Forecast(part, "process_store_coded", 100.0, "its rate, encoded on the way out: GB/s of plain blocks")
    yield Forecast(part, "process_load_coded", 110.0, "its rate, decoded on the way in, with checksums of the payloads")


def _sparse() -> Iterator[Forecast]:
    """On an H100. Bounds of 128 K tokens are 8.4 MB, which take 2.8 us, and a launch with its first
    loads 3. Those of 1 M are 67 MB: 22.5. The choice reads 16,384 scores five times: 6. Hot slots
    take eight dependent loads: 4. A layer then attends to 8 MB in two parts of 6 us, and joins them
    in 3. It brings 51 misses of 32 KiB, 1.7 MB, over a link of 55 GB/s in 31. The design promises
    35 us for a layer. Its bounds and its misses alone take longer one after the other, so the
    promise is judged for the steps up to the hot slots."""
    part = "sparse"
    yield Forecast(part, "sparse_right", RIGHT, "bounds, scores, choices, hot slots and fetches, to the bit")
    one = "Llama-3-8B, one request of"
    yield Forecast(part, "score_128k", 6.0, f"{one} 128 K tokens: scores of its granules, us", at_most=8.0)
    told = f"{one} 1 M tokens, of which each kv head chooses 2,048: scores, choice and hot slots, us"
    yield Forecast(part, "select_1m", 34.0, told, at_most=35.0)
    told = "the same with the fetch of misses, attention to hits and to misses, and their join, in turn, us"
    yield Forecast(part, "layer_1m", 82.0, told)
    for name, ratio, meaning in (
        ("fetch_256", 0.86, "misses in 256 parts of 16 KiB from mapped host memory"),
        ("fetch_2048", 0.91, "in 2,048 of 16 KiB"),
        ("fetch_2048_4k", 0.86, "in 2,048 of 4 KiB"),
    ):
        yield Forecast(part, name, ratio, f"{meaning}, against the link", at_least=0.85)


def _end_to_end() -> Iterator[Forecast]:
    """Estimates for an H100 that reads 3.08 TB/s.

    A prompt of 8.5 K takes 254 ms of products (550 TFLOP/s), 166 of attention (120) and 30 of all
    else. Its last 512 tokens take 38. A GiB comes from the host in 26 ms, half of
    it beside computing, and from NVMe at 5 GB/s. A step of 64 sequences reads 15 GB of weights at
    2.5 TB/s (6.0 ms) and 34.6 GB of KV at 2.8 (12.4). Small launches of its graph take 1.0 ms (600
    of them), the host 0.7, and calls that name four blocks 2. A pass makes tables in 2 ms. It
    brings and searches all logits in 9.
    """
    part, told = "endtoend", "Llama-3-8B's shape, a prompt of 8 K and 512 tokens; its 8 K are"
    yield Forecast(part, "e2e_ttft_none", 450.0, f"{told} nowhere: ms to the first token")
    for source, ratio, meaning in (("device", 0.09, "on the device"), ("host", 0.11, "in host memory"), ("nvme", 0.5, "on NVMe")):  # fmt: skip
        yield Forecast(part, f"e2e_ttft_{source}", ratio, f"{told} {meaning}: against nowhere", at_most=1.0)
    yield Forecast(part, "e2e_tokens", RIGHT, "the first tokens of that prompt, equal from every source")
    told = "64 sequences of 4 K, tokens a second against reading weights and KV alone"
    yield Forecast(part, "e2e_decode", 0.73, f"{told}: pages of the daemon", at_least=0.80)
    yield Forecast(part, "e2e_decode_plain", 0.80, f"{told}: plain pages")
    yield Forecast(part, "e2e_decode_passes", 0.52, f"{told}: plain pages, without CUDA graphs")


def _sanitizers() -> Iterator[Forecast]:
    for name, meaning in {
        "memcheck": "bad and misaligned addresses",
        "racecheck": "races in shared memory",
        "synccheck": "barriers that not all threads reach",
    }.items():
        yield Forecast(
            "sanitizers", f"sanitizer_{name}", RIGHT, f"small cases of each kernel under compute-sanitizer: {meaning}"
        )


FORECASTS = {
    forecast.name: forecast
    for table in (
        _probes,
        _correctness,
        _decode,
        _others,
        _link,
        _together,
        _rotated,
        _sparse,
        _end_to_end,
        _sanitizers,
    )
    for forecast in table()
}


def verdict(result: Result, *, is_judged: bool = True) -> str:
    """`passed`, `missed`, `failed`; "" without a promise. is_judged: promises cover the sizes."""
    if isinstance(result, Check):
        return "passed" if result.passed else "failed"
    if isinstance(result, Fact | Left):
        return ""
    forecast = FORECASTS[result.name]
    if forecast.at_least is None and forecast.at_most is None:
        return ""
    return ("passed" if _is_kept(result, forecast) else "missed") if is_judged else ""


def _is_kept(row: Row, forecast: Forecast) -> bool:
    number = row.value if row.ratio is None else row.ratio
    return (forecast.at_least is None or number >= forecast.at_least) and (
        forecast.at_most is None or number <= forecast.at_most
    )
