"""What is broken in the kernels, one at a time, to see that their tests notice: `python -m tools.kernel_mutants` tries it.

Purpose: the table `MUTANTS`. Non-purpose: how they are tried. Invariant: what is replaced stands in its file exactly once, which a test sees to.
Every barrier and every wait has a row but the two waits at the ends of decode and prefill: all that they wait for is empty groups of copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutant:
    """what: the fault. file: under cuda/src, where `old` stands once. unit: the source file whose cases should notice."""

    name: str
    what: str
    file: str
    old: str
    new: str
    unit: str

    def is_there(self, sources: Path) -> bool:
        """Whether its text stands in its file exactly once."""
        return (sources / "src" / self.file).read_text(encoding="utf-8").count(self.old) == 1


DECODE, PREFILL, PAGES, MERGE, HASH, READ = "decode", "prefill", "pages", "merge", "hash", "read"
MUTANTS: tuple[Mutant, ...] = (
    # -- barriers and waits
    Mutant(
        "decode-await",
        "decode works on a tile one group of copies too early",
        "decode.cu",
        "if (p.ring > 2) simt::await_copies<1>();",
        "if (p.ring > 2) simt::await_copies<2>();",
        DECODE,
    ),
    Mutant(
        "decode-await-all",
        "the same where one group alone is under way",
        "decode.cu",
        "else simt::await_copies<0>();",
        "else simt::await_copies<1>();",
        DECODE,
    ),
    Mutant(
        "decode-turn",
        "a ring of two tiles is taken for one of three",
        "decode.cu",
        "slot + 1 < p.ring ? slot + 1 : 0;",
        "slot + 1 < 3 ? slot + 1 : 0;",
        DECODE,
    ),
    Mutant(
        "decode-syncwarp",
        "lanes read what others' copies brought without a barrier",
        "decode.cu",
        "__syncwarp();",
        "",
        DECODE,
    ),
    Mutant(
        "decode-refill",
        "a slot of the ring is filled before the warp's barrier says that it was read",
        "decode.cu",
        "__syncwarp();\n        load_ahead(tile + (p.ring - 1) * kWarps, (slot ? slot : p.ring) - 1);",
        "load_ahead(tile + (p.ring - 1) * kWarps, (slot ? slot : p.ring) - 1);\n        __syncwarp();",
        DECODE,
    ),
    Mutant(
        "decode-ring",
        "the tile that is worked on is overwritten",
        "decode.cu",
        "load_ahead(tile + (p.ring - 1) * kWarps, (slot ? slot : p.ring) - 1);",
        "load_ahead(tile + (p.ring - 1) * kWarps, slot);",
        DECODE,
    ),
    Mutant(
        "join-before",
        "warps' results are joined before all have written them",
        "decode.cu",
        "    __syncthreads();\n    for (int i = threadIdx.x; i < group * kDim",
        "    for (int i = threadIdx.x; i < group * kDim",
        DECODE,
    ),
    Mutant(
        "join-after",
        "the next row's results go where the last row's are still read",
        "decode.cu",
        "__syncthreads();  // before the next row's results go there",
        "",
        DECODE,
    ),
    Mutant(
        "plan-read",
        "a prefix sum reads what a neighbour has not written",
        "decode.cu",
        "  sums[me] = mine;\n  __syncthreads();",
        "  sums[me] = mine;",
        DECODE,
    ),
    Mutant(
        "plan-write",
        "a prefix sum writes what a neighbour still reads",
        "decode.cu",
        "    __syncthreads();\n    sums[me] += before;",
        "    sums[me] += before;",
        DECODE,
    ),
    Mutant(
        "mass-barrier",
        "masses are zeroed after they were written",
        "decode.cu",
        "mass[page] = 0.f;\n  __syncthreads();",
        "mass[page] = 0.f;",
        DECODE,
    ),
    Mutant(
        "prefill-await",
        "prefill works on a stage that has not landed",
        "prefill.cu",
        "await_copies<1>",
        "await_copies<2>",
        PREFILL,
    ),
    Mutant(
        "prefill-half",
        "one tile's values are brought by nobody",
        "prefill.cu",
        "brings_v = simt::warp() >= kPrefillWarps - p.stage_tiles;",
        "brings_v = simt::warp() > kPrefillWarps - p.stage_tiles;",
        PREFILL,
    ),
    Mutant(
        "prefill-stage",
        "a stage of two tiles is taken for one of four",
        "prefill.cu",
        "tiles.first_token(stage * p.stage_tiles + i);",
        "tiles.first_token(stage * kPrefillWarps + i);",
        PREFILL,
    ),
    Mutant(
        "prefill-before",
        "a warp reads tiles that others bring, without a barrier",
        "prefill.cu",
        "      __syncthreads();\n      const unsigned char* here",
        "      const unsigned char* here",
        PREFILL,
    ),
    Mutant(
        "prefill-after",
        "a stage is filled anew while others read it",
        "prefill.cu",
        "__syncthreads();  // before this stage is filled anew",
        "",
        PREFILL,
    ),
    Mutant(
        "plan-next",
        "the next step of the sums begins while this one is under way",
        "decode.cu",
        "sums[me] += before;\n    __syncthreads();",
        "sums[me] += before;",
        DECODE,
    ),
    # -- masks
    Mutant(
        "decode-tail",
        "tokens behind a length are seen",
        "decode.cu",
        "first + token < length && is_in_window",
        "is_in_window",
        DECODE,
    ),
    Mutant(
        "decode-tail-index",
        "one token behind a length is seen",
        "decode.cu",
        "first + token < length && is_in_window",
        "first + token <= length && is_in_window",
        DECODE,
    ),
    Mutant("tile-tail", "one stale row of a tile is read", "tile.h", "row < rows);", "row <= rows);", DECODE),
    Mutant("causal", "a query does not see itself", "prefill.cu", "token <= position", "token < position", PREFILL),
    Mutant(
        "causal-offset",
        "queries stand one token further on",
        "prefill.cu",
        "before = length - tokens;",
        "before = length - tokens + 1;",
        PREFILL,
    ),
    Mutant(
        "window",
        "a window is one token too wide",
        "batch.h",
        "token > position - batch.window",
        "token >= position - batch.window",
        DECODE,
    ),
    Mutant(
        "window-of-chunks",
        "the oldest query's window is taken for one token shorter",
        "prefill.cu",
        "oldest - p.batch.window + 1);",
        "oldest - p.batch.window + 2);",
        PREFILL,
    ),
    Mutant("sinks", "one sink too many", "batch.h", "token < batch.sinks", "token <= batch.sinks", PREFILL),
    Mutant(
        "sink-tiles",
        "a tile with few sinks is left out",
        "batch.h",
        "tiles_for(batch.sinks)",
        "batch.sinks / kTileTokens",
        DECODE,
    ),
    Mutant(
        "skipped-tiles",
        "the list of tiles skips one too late",
        "batch.h",
        "(i < skipped_from",
        "(i <= skipped_from",
        DECODE,
    ),
    # -- chosen pages
    Mutant(
        "subset-head",
        "every kv head sees the pages of the first",
        "batch.h",
        "batch.subsets + (int64_t)row * batch.subset_stride",
        "batch.subsets + (int64_t)request * batch.kv_heads * batch.subset_stride",
        PREFILL,
    ),
    Mutant(
        "subset-size",
        "every kv head sees as many pages as the first",
        "batch.h",
        "batch.subset_sizes[row]",
        "batch.subset_sizes[0]",
        DECODE,
    ),
    Mutant(
        "subset-tile",
        "of a chosen page the first tile is taken for all",
        "batch.h",
        "subset[i / page_tiles] * page_tiles + i % page_tiles",
        "subset[i / page_tiles] * page_tiles",
        PREFILL,
    ),
    Mutant(
        "subset-order",
        "chosen pages are taken for those at the beginning",
        "batch.h",
        "if (subset) return (subset[i / page_tiles] * page_tiles + i % page_tiles) * kTileTokens;",
        "if (subset) return i * kTileTokens;",
        PREFILL,
    ),
    Mutant(
        "subset-row",
        "every row of decode sees the pages of the first",
        "decode.cu",
        "p.batch.subsets + (int64_t)number * p.batch.subset_stride",
        "p.batch.subsets",
        DECODE,
    ),
    # -- the plan and the merges
    Mutant(
        "plan-starts",
        "rows begin where they end",
        "decode.cu",
        "int sum = sums[me] - mine;",
        "int sum = sums[me];",
        DECODE,
    ),
    Mutant(
        "plan-run",
        "a block leaves out the last tile of its run",
        "decode.cu",
        "min((block + 1) * each, tiles)};",
        "min((block + 1) * each - 1, tiles)};",
        DECODE,
    ),
    Mutant(
        "plan-row",
        "the first tile of a run is taken for one of the next row",
        "decode.cu",
        "(starts[middle] <= tile",
        "(starts[middle] <= tile + 1",
        DECODE,
    ),
    Mutant(
        "merge-parts",
        "a part too many is merged",
        "decode.cu",
        "(end - 1) / each : first - 1",
        "end / each : first - 1",
        DECODE,
    ),
    Mutant(
        "join-rescale",
        "warps' results are added as they are",
        "decode.cu",
        "const float share = simt::exp2_fast(tops[w * group + row] - base);",
        "const float share = tops[w * group + row] > -INFINITY ? 1.f : 0.f;",
        DECODE,
    ),
    Mutant(
        "softmax-rescale",
        "what was gathered does not shrink when a greater score comes",
        "attend.h",
        "out[i][0] *= shrink[0], out[i][1] *= shrink[0], ",
        "",
        PREFILL,
    ),
    Mutant(
        "weights-rest",
        "what rounding leaves of a weight is not multiplied",
        "attend.h",
        "std::is_same_v<Query, Math> ? 2 : 1;",
        "1;",
        DECODE,
    ),
    Mutant(
        "rounded-rescale",
        "the sum of weights as they are multiplied does not shrink",
        "attend.h",
        "rounded[r] *= shrink;",
        "",
        DECODE,
    ),
    Mutant(
        "sum-rescale",
        "the sum of weights does not shrink",
        "attend.h",
        "sum[r] = sum[r] * shrink",
        "sum[r] = sum[r]",
        DECODE,
    ),
    Mutant(
        "decode-merge-rescale",
        "parts of decode are added as they are",
        "decode.cu",
        "out += simt::exp2_fast(p.lse[part(block)] - base) * p.out",
        "out += p.out",
        DECODE,
    ),
    Mutant("merge-rescale", "parts are added as they are", "merge.cu", "out += share *", "out +=", MERGE),
    Mutant("merge-nothing", "a part that saw nothing is read", "merge.cu", "if (share > 0.f) out", "out", MERGE),
    Mutant(
        "mass-unseen",
        "pages that nobody saw have a mass",
        "decode.cu",
        "mass[page] = 0.f;\n",
        "(void)mass[page];\n",
        DECODE,
    ),
    Mutant(
        "mass-page",
        "a page's mass is partly that of the next one",
        "decode.cu",
        "if (at / p.page_tokens != page) break;",
        "",
        DECODE,
    ),
    # -- matrices
    Mutant(
        "keys-rows",
        "matrix loads of keys take rows and channels in each other's order",
        "tile.h",
        "tile + at((lane & 7) + (lane >> 4 << 3), 2 * block + (lane >> 3 & 1))",
        "tile + at((lane & 7) + ((lane >> 3 & 1) << 3), 2 * block + (lane >> 4))",
        DECODE,
    ),
    Mutant(
        "values-rows",
        "matrix loads of e4m3 values take the rows of one half",
        "tile.h",
        "tile + at((lane & 7) + ((lane >> 3 & 1) << 3), block + (lane >> 4))",
        "tile + at(lane & 7, block + (lane >> 4))",
        DECODE,
    ),
    Mutant("values-bytes", "two tokens of a channel change places", "tile.h", "0, 0x31)", "0, 0x13)", PREFILL),
    # -- pages
    Mutant("store-nowhere", "a token without a slot is stored", "pages.cu", "if (slot < 0) return;", "", PAGES),
    Mutant(
        "store-scale",
        "values are divided by the scale of keys",
        "pages.cu",
        "widen(v[i]) / v_scale",
        "widen(v[i]) / k_scale",
        PAGES,
    ),
    Mutant(
        "store-offset",
        "a token goes to the beginning of its page",
        "pages.cu",
        "slot % p.page_tokens * p.token_stride",
        "0",
        PAGES,
    ),
    Mutant(
        "copy-pages",
        "the ids of pages are not looked at",
        "pages.cu",
        "side.pages ? side.pages[at[0]] : at[0]",
        "at[0]",
        PAGES,
    ),
    Mutant(
        "copy-rest",
        "what is left after one turn of the grid is not copied",
        "pages.cu",
        "i < all; i +=",
        "i < all && i < (int64_t)gridDim.x * blockDim.x; i +=",
        PAGES,
    ),
    Mutant(
        "copy-layers",
        "all layers come from the first tensor",
        "pages.cu",
        "side.layers[at[1]]",
        "side.layers[0]",
        PAGES,
    ),
    Mutant("runs-rest", "each block copies one run", "pages.cu", "run += gridDim.x", "run = p.count", PAGES),
    Mutant(
        "runs-tail", "bytes behind the last whole 16 stay behind", "pages.cu", "i < length; i +=", "i < 0; i +=", PAGES
    ),
    Mutant(
        "summary-tail", "one stale token counts", "pages.cu", "token < p.tokens[page]", "token <= p.tokens[page]", PAGES
    ),
    # -- sums
    Mutant("hash-scramble", "blocks are not scrambled", "hash.cu", "scramble(accumulators, scrambling);", "", HASH),
    Mutant(
        "hash-stripe",
        "the last stripe is a whole one",
        "hash.cu",
        "data + length - kStripeBytes",
        "data + (length - 1) / 64 * 64",
        HASH,
    ),
    Mutant(
        "hash-full-block",
        "a full last block is scrambled",
        "hash.cu",
        "blocks = (length - 1) / kBlockBytes",
        "blocks = length / kBlockBytes",
        HASH,
    ),
    Mutant(
        "hash-lanes",
        "half of a block's stripes is left out",
        "hash.cu",
        "over_lanes(sum, kStripeLanes, 32)",
        "over_lanes(sum, kStripeLanes, 16)",
        HASH,
    ),
    Mutant("hash-crossed", "words feed their own accumulators", "hash.cu", "data.words[1 - i]", "data.words[i]", HASH),
    Mutant("hash-path", "129 bytes take the path of 128", "hash.cu", "length <= 128", "length <= 129", HASH),
    Mutant(
        "hash-ahead",
        "blocks that were loaded ahead are used twice",
        "hash.cu",
        "load(ring[i], first + i + kAhead);",
        "",
        HASH,
    ),
    Mutant(
        "hash-granule",
        "unaligned bytes are of the wrong half of a granule",
        "hash.cu",
        "offset < 8 ?",
        "offset <= 8 ?",
        HASH,
    ),
    Mutant(
        "hash-empty", "a slice of no bytes is read", "hash.cu", "if (length == 0) return", "if (false) return", HASH
    ),
    # -- what benchmarks call the memory's bandwidth
    Mutant("read-tail", "a piece behind the end is read", "read.cu", "at < p.pieces ?", "at <= p.pieces ?", READ),
    Mutant("read-rest", "one turn of all blocks is read", "read.cu", "first += step)", "first = p.pieces)", READ),
    Mutant(
        "read-ahead",
        "of loads under way one is left out",
        "read.cu",
        "i * kReadThreads",
        "i / 2 * 2 * kReadThreads",
        READ,
    ),
)
