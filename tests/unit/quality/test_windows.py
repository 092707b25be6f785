"""Windows of a text, and what is left of it for a calibration."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierd.errors import ConfigError, InvalidArgument
from tierd.quality.windows import Lengths, Text, calibration_windows, read_text, windows_of

SHORT = Lengths(prefix=96, continuation=32, unscored=8)


def counted(length: int, begin: int | None = -1) -> Text:
    """A text whose tokens are their own places in it."""
    return Text(np.arange(length), begin, 4)


def test_windows_are_those_of_the_study() -> None:
    """Windows lie at equal distances and begin with the begin token; a passage to recall starts where
    numpy's generator of seed 17 says."""
    found = windows_of(counted(10_000), 3)
    assert [len(window.prefix) for window in found] == [768] * 3
    assert [window.prefix[0] for window in found] == [-1] * 3
    assert [window.prefix[1] for window in found] == [0, 2992, 5984]
    chance = np.random.default_rng(17)
    for window in found:
        start, passage = window.prefix[1], int(chance.integers(8, 480))
        np.testing.assert_array_equal(window.ways[0], start + 767 + np.arange(257))
        np.testing.assert_array_equal(window.ways[1], start + passage + np.arange(257))


@given(length=st.integers(128, 3000), count=st.integers(1, 20), has_begin=st.booleans())
def test_windows_stay_in_the_text(length: int, count: int, has_begin: bool) -> None:
    """Windows do not overlap; each passage to recall is in its own prefix; too many are refused."""
    text = counted(length, -1 if has_begin else None)
    size = 128 + (not has_begin)
    if count * size > length:
        with pytest.raises(InvalidArgument, match="do not fit" if length >= size else "longer text"):
            windows_of(text, count, SHORT)
        return
    found = windows_of(text, count, SHORT)
    used = np.concatenate([np.concatenate((window.prefix[has_begin:], window.ways[0])) for window in found])
    assert (np.diff(used) >= 1).all() and used[-1] < length
    for window in found:
        assert len(window.prefix) == 96 and window.ways.shape == (2, 33)
        assert set(window.ways[1]) <= set(window.prefix[has_begin:])


@given(length=st.integers(256, 5000), between=st.integers(0, 8), tokens=st.integers(1, 4000))
def test_a_calibration_takes_no_token_of_a_measurement(length: int, between: int, tokens: int) -> None:
    """Its windows are distinct text outside all windows to measure, and as many as the tokens fill."""
    text = counted(length)
    try:
        found = calibration_windows(text, tokens, between=between, lengths=SHORT)
    except InvalidArgument:
        assert between and length < 256 * (between + 1)
        return
    used = np.concatenate([window[1:] for window in found])
    assert [window[0] for window in found] == [-1] * len(found)
    assert len(set(used)) == len(used)
    if between:
        measured = windows_of(text, between, SHORT)
        taken = np.concatenate([np.concatenate((window.prefix, window.ways[0])) for window in measured])
        assert not set(used) & set(taken)
    elif length >= 2 * tokens + 256:
        assert tokens <= 128 * len(found) < tokens + 128


def test_ids_are_tokens_of_a_usual_size(folder: Path, tmp_path: Path) -> None:
    """A .npy of ids is taken as it is, one usual token each; bytes count a quarter of one."""
    np.save(tmp_path / "ids.npy", np.array([5, 257], np.uint16))
    (tmp_path / "text").write_bytes(b"\x00\xff")
    ids, text = (read_text(tmp_path / name, folder, 258) for name in ("ids.npy", "text"))
    assert (ids.tokens.tolist(), ids.begin, ids.per_token) == ([5, 257], 256, 1)
    assert (text.tokens.tolist(), text.begin, text.per_token) == ([0, 255], 256, 4)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (np.array([0, 258]), "ids from 0 to 258, the model has 0 to 257"),
        (np.array([-1, 3]), "ids from -1"),
        (np.array([0.5]), "float64"),
        (np.zeros((2, 2), int), r"shape \(2, 2\)"),
        (np.array([], int), "shape"),
        (np.array([{}]), "allow_pickle"),
    ],
)
def test_ids_that_are_none_are_refused(folder: Path, tmp_path: Path, ids: np.ndarray, words: str) -> None:
    """Ids outside the vocabulary, and arrays that are no ids, are refused by what is wrong."""
    np.save(tmp_path / "ids.npy", ids)
    with pytest.raises(InvalidArgument, match=words):
        read_text(tmp_path / "ids.npy", folder, 258)


def test_bytes_are_refused_where_they_are_no_tokens(tmp_path: Path) -> None:
    """Bytes are no tokens of a model with a tokenizer, or with fewer than 256 tokens."""
    (tmp_path / "text").write_bytes(b"text")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_text(tmp_path / "text", tmp_path, 300)
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert read_text(tmp_path / "text", tmp_path, 256).begin is None
    with pytest.raises(InvalidArgument, match="bytes need 256"):
        read_text(tmp_path / "text", tmp_path, 255)
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(InvalidArgument, match="has a tokenizer"):
        read_text(tmp_path / "text", tmp_path, 300)
