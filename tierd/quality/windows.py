"""Windows of a text, and two ways to go on after the first part of each.

    begin token, 767 tokens of text | the next 257 of the text            restore
              the same prefix       | 257 from within the prefix, again   recall

The prefix is stored and read back. In recall only the cache can tell what comes. Equal texts give
equal windows, so figures of two runs can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierd.errors import ConfigError, InvalidArgument

Tokens = NDArray[np.int64]
"""Token ids: int64 [tokens]."""

WINDOWS = 40
"""Windows of a measurement, unless another number is given."""
BYTES_PER_TOKEN = 4
"""Of a usual vocabulary on English text."""
_SEED = 17
_FIRST_PASSAGE, _SPACE = 8, 32
"""A repeated passage begins at this token or later, and ends so many before the prefix ends."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of a window, in tokens. prefix: with the begin token. unscored: of a repeated passage, its first
    tokens, which say what is repeated."""

    prefix: int = 768
    continuation: int = 256
    unscored: int = 32

    @property
    def tokens(self) -> int:
        """Of the text in a window; the begin token comes on top."""
        return self.prefix + self.continuation


USUAL = Lengths()


class Text(NamedTuple):
    """A text in a model's tokens. begin: the token before each window; None: the model has none.

    per_token: how many of its tokens make one of a usual vocabulary; 4 if tokens are bytes.
    """

    tokens: Tokens
    begin: int | None
    per_token: int


class Window(NamedTuple):
    """prefix: int64 [prefix]. ways: int64 [2, continuation + 1], restore and recall; the last token
    is only predicted."""

    prefix: Tokens
    ways: NDArray[np.int64]


def read_text(path: Path, model: Path, vocab_size: int) -> Text:
    """A text for a model. A file .npy holds token ids; another one is read as bytes, each a token.

    Raises ConfigError, InvalidArgument, OSError.
    """
    begin = _begin_token(model)
    if path.suffix == ".npy":
        return _ids(path, begin, vocab_size)
    if any((model / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        raise InvalidArgument(
            f"text {path}: the model in {model} has a tokenizer, so bytes are not its tokens; save token ids with "
            "numpy.save and pass that .npy file"
        )
    if vocab_size < 256:
        raise InvalidArgument(f"text {path}: the model has {vocab_size} tokens, bytes need 256; pass ids as .npy")
    return Text(np.frombuffer(path.read_bytes(), np.uint8).astype(np.int64), begin, BYTES_PER_TOKEN)


def windows_of(text: Text, count: int, lengths: Lengths = USUAL) -> list[Window]:
    """So many windows at equal distances. Raises InvalidArgument if they do not fit the text."""
    chance = np.random.default_rng(_SEED)
    head = np.array([] if text.begin is None else [text.begin], np.int64)
    cut = []
    for start, stop in _places(text, count, lengths):
        tokens = np.concatenate((head, text.tokens[start:stop]))
        prefix, rest = tokens[: lengths.prefix], tokens[lengths.prefix :]
        passage = 1 + int(chance.integers(_FIRST_PASSAGE, lengths.prefix - lengths.continuation - _SPACE))
        cut.append(Window(prefix, np.stack((rest, prefix[passage:][: len(rest)]))))
    return cut


def calibration_windows(text: Text, tokens: int, *, between: int = WINDOWS, lengths: Lengths = USUAL) -> list[Tokens]:
    """Windows of so many tokens in all, from everywhere in the text, each with the begin token.

    between: windows of a measurement on the same text, whose tokens are not taken. 0: all text is
    free. Raises InvalidArgument if the free text is shorter than one window.
    """
    pieces = _pieces(text, between, lengths) if between else [text.tokens]
    head = np.array([] if text.begin is None else [text.begin], np.int64)
    size = lengths.tokens - len(head)
    free = [piece[at : at + size] for piece in pieces for at in range(0, len(piece) - size + 1, size)]
    if not free:
        raise InvalidArgument(
            f"calibration: no {size} tokens of text lie between {between} windows; give a longer text, or another "
            "text than the one to measure on and --between-windows 0"
        )
    count = min(len(free), -(-tokens // lengths.tokens))
    return [np.concatenate((head, free[i * len(free) // count])) for i in range(count)]


def _pieces(text: Text, windows: int, lengths: Lengths) -> list[Tokens]:
    """The pieces of the text in none of so many windows, in order."""
    places = _places(text, windows, lengths)
    ends = [*(start for start, _ in places[1:]), len(text.tokens)]
    return [text.tokens[stop:end] for (_, stop), end in zip(places, ends, strict=True)]


def _places(text: Text, count: int, lengths: Lengths) -> Sequence[tuple[int, int]]:
    """Start and stop of each window in the text."""
    held, size = len(text.tokens), lengths.tokens + (text.begin is None)
    if held < size:
        raise InvalidArgument(f"text: it has {held} tokens, a window has {size}; give a longer text")
    if not 1 <= count <= held // size:
        raise InvalidArgument(
            f"windows: {count} of {size} tokens do not fit a text of {held}; ask for 1 to {held // size}, or give a "
            "longer text"
        )
    step = (held - size) // count
    return [(i * step, i * step + size) for i in range(count)]


def _begin_token(model: Path) -> int | None:
    """The model's begin token, from its config.json."""
    try:
        said = json.loads((model / "config.json").read_text(encoding="utf-8")).get("bos_token_id")
    except (OSError, ValueError, AttributeError) as fault:
        raise ConfigError(f"{model / 'config.json'}: {fault}; a checkpoint folder holds this file") from fault
    return int(said[0] if isinstance(said, list) else said) if said is not None else None


def _ids(path: Path, begin: int | None, vocab_size: int) -> Text:
    try:
        ids = np.load(path, allow_pickle=False)
    except ValueError as fault:
        raise InvalidArgument(f"text {path}: {fault}; save token ids with numpy.save") from fault
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise InvalidArgument(f"text {path}: {ids.dtype} of shape {ids.shape}; save integers in one dimension")
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise InvalidArgument(
            f"text {path}: ids from {ids.min()} to {ids.max()}, the model has 0 to {vocab_size - 1}; use its tokenizer"
        )
    return Text(ids.astype(np.int64), begin, 1)
