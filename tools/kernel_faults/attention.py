"""Faults of prompts and of the merges."""

from __future__ import annotations

from tools.kernel_faults.mutant import MERGE, PREFILL, Mutant

ATTENTION: tuple[Mutant, ...] = (
    # -- barriers and waits
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
        "__syncthreads();  // before this stage is filled again",
        "",
        PREFILL,
    ),
    # -- masks
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
        "window-of-chunks",
        "the oldest query's window is taken for one token shorter",
        "prefill.cu",
        "oldest - p.batch.window + 1);",
        "oldest - p.batch.window + 2);",
        PREFILL,
    ),
    Mutant("sinks", "one sink too many", "batch.h", "token < batch.sinks", "token <= batch.sinks", PREFILL),
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
    # -- scales and heads
    Mutant(
        "prefill-key-scale", "the same of a prompt's keys", "prefill.cu", "p.k_scales[head]", "p.k_scales[0]", PREFILL
    ),
    Mutant("prefill-value-scale", "and of its values", "prefill.cu", "p.v_scales[head]", "p.v_scales[0]", PREFILL),
    # -- addresses beyond 32 bits
    Mutant("prefill-far", "the same for a prompt", "prefill.cu", "const int64_t at = id", "const int at = id", PREFILL),
    # -- the plan and the merges
    Mutant(
        "softmax-rescale",
        "what was gathered does not shrink when a greater score comes",
        "attend.h",
        "out[i][0] *= shrink[0], out[i][1] *= shrink[0], ",
        "",
        PREFILL,
    ),
    Mutant(
        "prefill-rescale",
        "neither sum of a prompt's weights shrinks",
        "attend.h",
        "    sum[r] = sum[r] * shrink + mine;\n    rounded[r] *= shrink;",
        "    sum[r] = sum[r] + mine;",
        PREFILL,
    ),
    Mutant("merge-rescale", "parts are added as they are", "merge.cu", "out[c] += shares[k] *", "out[c] +=", MERGE),
    Mutant(
        "merge-nothing",
        "a part that saw nothing is read",
        "merge.cu",
        "shares[k] > 0.f ? p.template outs_of<Some>(part, all)[i] : Some{}",
        "p.template outs_of<Some>(part, all)[i]",
        MERGE,
    ),
    Mutant("merge-rest", "four parts are merged", "merge.cu", "first += kAtOnce", "first = p.parts", MERGE),
    # -- NaN and infinities, and rows that were not foretold
    Mutant(
        "prefill-nan",
        "a sum of NaN is taken for nothing that a prompt's query saw",
        "prefill.cu",
        "lse_of(attention.top[r], log2f(attention.sum[r]), attention.sum[r]) * kLn2",
        "(attention.sum[r] > 0.f ? attention.top[r] + log2f(attention.sum[r]) : -INFINITY) * kLn2",
        PREFILL,
    ),
    Mutant(
        "prefill-infinite",
        "a prompt's query beyond fp16 makes scores of -inf",
        "attend.h",
        "words[b][r] = q ? pack_query<Math>",
        "words[b][r] = q ? Math::pack",
        PREFILL,
    ),
    Mutant(
        "prefill-infinite-half",
        "the same in the second half of a block of channels",
        "attend.h",
        "words[b][r + 2] = q ? pack_query<Math>",
        "words[b][r + 2] = q ? Math::pack",
        PREFILL,
    ),
    Mutant(
        "prefill-rest",
        "rows beyond those that were foretold are left as they were",
        "prefill.cu",
        "if (blockIdx.x == gridDim.x - 1) spoil_rest(p);",
        "",
        PREFILL,
    ),
    Mutant(
        "merge-nan",
        "a merge with a part of NaN is zeros",
        "merge.cu",
        "sum == 0.f ? 0.f : out[c] / sum",
        "sum > 0.f ? out[c] / sum : 0.f",
        MERGE,
    ),
    Mutant(
        "merge-nan-lse",
        "and has seen nothing",
        "merge.cu",
        "lse_of(best, logf(sum), sum)",
        "sum > 0.f ? best + logf(sum) : -INFINITY",
        MERGE,
    ),
    # -- matrices
    Mutant("values-bytes", "two tokens of a channel change places", "tile.h", "0, 0x31)", "0, 0x13)", PREFILL),
)
