"""Faults of the kernels that move pages, sum slices or only read."""

from __future__ import annotations

from tools.kernel_faults.mutant import HASH, PAGES, READ, Mutant

MOVING: tuple[Mutant, ...] = (
    # -- pages
    Mutant("store-nowhere", "a token without a slot is stored", "pages.cu", "if (slot < 0) return;", "", PAGES),
    Mutant(
        "store-scale",
        "values are divided by the scale of keys",
        "pages.cu",
        "is_key ? p.k_scales : p.v_scales",
        "p.k_scales",
        PAGES,
    ),
    Mutant(
        "store-strides",
        "values are as far apart as keys",
        "pages.cu",
        "blockIdx.x * p.v_stride",
        "blockIdx.x * p.k_stride",
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
        "i < all; i += teams",
        "i < all && i < teams; i += teams",
        PAGES,
    ),
    Mutant(
        "copy-share",
        "every share of a long row is the first",
        "pages.cu",
        "first = rest % segments * kSegment",
        "first = 0",
        PAGES,
    ),
    Mutant(
        "copy-end",
        "the last share of a long row is a whole one",
        "pages.cu",
        "min(first + kSegment, pieces)",
        "first + kSegment",
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
    Mutant("summary-nan", "NaN has no say in bounds", "pages.cu", "x < least || x != x ? x", "x < least ? x", PAGES),
    Mutant(
        "summary-nan-most",
        "the same of the greatest",
        "pages.cu",
        "x > greatest || x != x ? x",
        "x > greatest ? x",
        PAGES,
    ),
    # -- addresses beyond 32 bits
    Mutant(
        "store-far",
        "the place of a new token is cut to 32 bits",
        "pages.cu",
        "const int64_t to = slot",
        "const int to = slot",
        PAGES,
    ),
    Mutant(
        "copy-far",
        "the same of either side of a copy",
        "pages.cu",
        "base + page * side.strides[0]",
        "base + (int)(page * side.strides[0])",
        PAGES,
    ),
    Mutant(
        "summary-far",
        "the same for bounds of keys",
        "pages.cu",
        "p.k + p.pages[page] * p.page_stride",
        "p.k + (int)(p.pages[page] * p.page_stride)",
        PAGES,
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
    # -- reads that measure the memory's bandwidth for benchmarks
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
