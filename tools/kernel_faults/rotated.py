"""Faults of the kernels for rotated codes."""

from __future__ import annotations

from tools.kernel_faults.mutant import ROT_DECODE, ROT_PAGES, Mutant


def _of_decode(name: str, what: str, old: str, new: str) -> Mutant:
    return Mutant(name, what, "rot_attend.h", old, new, ROT_DECODE)


def _of_pages(name: str, what: str, old: str, new: str) -> Mutant:
    return Mutant(name, what, "rot_pages.cu", old, new, ROT_PAGES)


ROTATED: tuple[Mutant, ...] = (
    # -- attention
    _of_decode("rot-nibble", "two nibbles are swapped", "simt::and_or(words[0] << 2", "simt::and_or(words[0] >> 2"),
    _of_decode("rot-byte", "two bytes are swapped", "simt::and_or(words[i] >> 6", "simt::and_or(words[i] << 2"),
    _of_decode("rot-surplus", "operands keep a surplus", "1.5f * (1 << kBits)", "1.f * (1 << kBits)"),
    _of_decode(
        "rot-key-scale",
        "a key has its neighbour's scale",
        "finite(scales[g + 8 * i])",
        "finite(scales[(g ^ 1) + 8 * i])",
    ),
    _of_decode(
        "rot-value-scale",
        "a value has its neighbour's scale",
        "finite(scales[kTileTokens + g + 8 * i])",
        "finite(scales[kTileTokens + (g ^ 1) + 8 * i])",
    ),
    _of_decode("rot-tail", "scores of stale tokens count", "seen[i] ? score * of_key[i]", "true ? score * of_key[i]"),
    _of_decode("rot-tail-value", "a stale token's scale counts", "of_value[i] = seen[i] ?", "of_value[i] = true ?"),
    _of_decode("rot-infinite", "an infinite scale stays", "fmaf(wide, 0.f, wide)", "wide"),
    _of_decode(
        "rot-power", "the query's power of two is lost", "factor[s][h] = __shfl", "factor[s][h] = 1.f + 0.f * __shfl"
    ),
    _of_decode(
        "rot-lanes", "queries and scores are of different heads", "lane = 4 * (2 * t + h)", "lane = 4 * (2 * t)"
    ),
    _of_decode(
        "rot-signs",
        "queries are not signed",
        "negated(Query::widen(pair.values[k]), signs, k)",
        "Query::widen(pair.values[k])",
    ),
    _of_decode(
        "rot-back-signs", "outputs have a neighbour's sign", "Turn::kNormal, signs, g)", "Turn::kNormal, signs, g ^ 1)"
    ),
    _of_decode("rot-back", "outputs are not rotated back", "      rotate_back(out[s]);\n", ""),
    _of_decode("rot-reach", "the greatest value scale stays the first one", "reach = next;", ""),
    _of_decode("rot-shrink", "earlier outputs keep their unit", "out[s][b][e] *= shrink;", ";"),
    _of_decode(
        "rot-shrink-sum", "earlier weights keep theirs", "rounded[s][0] *= shrink, rounded[s][1] *= shrink;", ""
    ),
    _of_decode("rot-range", "weights are not scaled up", "up = kWeightRange * inverse_of_power(reach);", "up = 1.f;"),
    _of_decode("rot-pieces", "pieces lie as they came", "slot + 16 * place", "slot + 16 * piece"),
    # -- pages
    _of_pages(
        "rot-rows",
        "rows are read before they came",
        "    simt::await_copies<0>();\n    __syncthreads();\n    for (int row",
        "    simt::await_copies<0>();\n    for (int row",
    ),
    _of_pages(
        "rot-packed", "codes are packed before they are there", "    report();\n    __syncthreads();", "    report();"
    ),
    _of_pages(
        "rot-halves",
        "the sum of a row has another order",
        "int by = kTeam / 2; by; by /= 2) total",
        "int by = 1; by < kTeam; by *= 2) total",
    ),
    _of_pages("rot-step", "a step has no upper limit", "return step > top ? top : step;", "return step;"),
    _of_pages("rot-clip", "8 bits clip outliers", "peak > least ? peak : least", "least"),
    _of_pages(
        "rot-nan",
        "NaN is a row of zeros",
        "const float step = peak > least ? peak : least;",
        "const float step = fmaxf(least, peak);",
    ),
    _of_pages(
        "rot-absent", "tokens behind the block's end are read", "16 * chunk, token < p.tokens);", "16 * chunk, true);"
    ),
    _of_pages("rot-found", "errors of other tiles are reported too", "    off = most = 0;\n", ""),
    _of_pages("rot-saturate", "a value beyond the type becomes infinite", "x > most ? most : ", ""),
    _of_pages(
        "rot-stored",
        "a block is written before its rows are",
        "decode_row(row);\n    __syncthreads();",
        "decode_row(row);",
    ),
)
