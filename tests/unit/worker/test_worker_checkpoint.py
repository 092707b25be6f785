"""Reading safetensors without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tierd.errors import ConfigError
from tierd.worker.checkpoint import open_checkpoint, random_checkpoint, read_safetensors
from tierd.worker.spec import LlamaSpec

SPEC = LlamaSpec(vocab_size=16, hidden_size=8, intermediate_size=12, layers=1, q_heads=2, kv_heads=1, head_dim=4)
CONFIG = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
}


def tensors() -> dict[str, Any]:
    """Float32 tensors of the small model."""
    return {name: raw.float32() for name, raw in random_checkpoint(SPEC).tensors.items()}


def write_folder(place: Path, *, shards: int = 1) -> Path:
    """A checkpoint folder of the small model, split into this many files."""
    (place / "config.json").write_text(json.dumps(CONFIG))
    if shards == 1:
        save_file(tensors(), place / "model.safetensors")
        return place
    files = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(tensors())}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors().items() if files[n] == file}, place / file)
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return place


def write_raw(path: Path, header: dict[str, Any], body: bytes) -> Path:
    """A safetensors file written by hand."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_gives_the_tensors_that_were_saved(tmp_path: Path, shards: int) -> None:
    """Every tensor arrives bit for bit, from one file or from the shards of an index."""
    checkpoint = open_checkpoint(write_folder(tmp_path, shards=shards))
    assert checkpoint.tensors.keys() == tensors().keys()
    for name, want in tensors().items():
        np.testing.assert_array_equal(checkpoint.tensors[name].float32(), want)


def test_bf16_is_the_upper_half_of_float32(tmp_path: Path) -> None:
    """bfloat16 values, infinities and NaN too, become the float32 with the same leading bits."""
    bits = np.array([0x3F80, 0xC049, 0x0001, 0x7F80, 0x7FC0], dtype="<u2")
    header = {"x": {"dtype": "BF16", "shape": [5], "data_offsets": [0, 10]}}
    got = read_safetensors(write_raw(tmp_path / "x", header, bits.tobytes()))["x"].float32()
    np.testing.assert_array_equal(got.view(np.uint32), bits.astype(np.uint32) << 16)


def test_the_digest_is_of_the_values_not_of_the_files(tmp_path: Path) -> None:
    """Shards do not change the digest; one changed byte does."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = open_checkpoint(write_folder(tmp_path / "one"))
    assert one.digest == open_checkpoint(write_folder(tmp_path / "two", shards=2)).digest
    path = tmp_path / "one" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    assert open_checkpoint(tmp_path / "one").digest != one.digest


def test_random_weights_follow_from_their_seed() -> None:
    """The same shape and seed give the same weights; another seed gives others."""
    assert random_checkpoint(SPEC, seed=1).digest == random_checkpoint(SPEC, seed=1).digest
    assert random_checkpoint(SPEC, seed=1).digest != random_checkpoint(SPEC, seed=2).digest


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        "text",
    ],
)
def test_a_tensor_outside_its_file_is_refused(tmp_path: Path, entry: Any) -> None:
    """Offsets, shapes and kinds that do not fit the file's bytes raise ConfigError."""
    with pytest.raises(ConfigError):
        read_safetensors(write_raw(tmp_path / "x", {"x": entry}, bytes(8)))


@pytest.mark.parametrize("content", [b"", b"\x05", b"\xff" * 16, (4).to_bytes(8, "little") + b"{]{]"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file that is cut or is no safetensors file raises ConfigError."""
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ConfigError):
        read_safetensors(tmp_path / "x")


def test_an_incomplete_checkpoint_is_refused(tmp_path: Path) -> None:
    """A missing tensor is named when the folder is opened."""
    write_folder(tmp_path)
    save_file({n: t for n, t in tensors().items() if n != "model.norm.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        open_checkpoint(tmp_path)


def test_an_index_names_files_beside_it_only(tmp_path: Path) -> None:
    """A shard with a path in its name is refused."""
    write_folder(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    with pytest.raises(ConfigError):
        open_checkpoint(tmp_path)
