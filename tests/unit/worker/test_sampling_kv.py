"""Samples of a model's keys and values, for calibrations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tierd.codecs.fit import make
from tierd.errors import InvalidArgument
from tierd.worker import sampling_kv
from tierd.worker.checkpoint import open_checkpoint, random_checkpoint
from tierd.worker.model import Llama
from tierd.worker.sampling_kv import samples
from tierd.worker.spec import LlamaSpec

SPEC = LlamaSpec(vocab_size=64, hidden_size=32, intermediate_size=48, layers=2, q_heads=4, kv_heads=2, head_dim=8)
WINDOWS = [[1, 5, 9, 3, 7, 60], [5, 2, 2, 8]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of random weights."""
    checkpoint = random_checkpoint(SPEC, scale=0.3)
    save_file({name: tensor.float32() for name, tensor in checkpoint.tensors.items()}, tmp_path / "model.safetensors")
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    return tmp_path


def test_samples_of_a_model(folder: Path) -> None:
    """All tokens' keys before RoPE and values, and what stands for their weight, make a calibration."""
    done: list[int] = []
    found = samples(folder, WINDOWS, done.append)
    assert done == [1, 2] and found.values.shape == (2, 2, 10, 2, 8)
    # The first layer's keys before RoPE, and its values, depend on the token alone.
    assert np.allclose(found.values[0, :, 7], found.values[0, :, 8], atol=1e-5)
    assert not np.allclose(found.values[1, :, 7], found.values[1, :, 8], atol=1e-3)
    if found.gradients is None:
        assert found.queries is not None and found.outputs is not None
        assert found.queries.shape == (2, 10, 4, 8) and found.outputs.shape == (2, 32, 32)
    else:
        assert found.gradients.shape == found.values.shape
    assert make(found).geometry == SPEC.geometry("bfloat16")


def test_attention_is_that_of_the_worker(folder: Path) -> None:
    """Both libraries sample the same keys and values, which the second layer's attention has changed."""
    pytest.importorskip("torch", reason="torch is not installed")
    with_torch = samples(folder, WINDOWS)
    model = Llama(open_checkpoint(folder))
    plain = [sampling_kv._before_rope(sampling_kv._queries(model, w)[0], with_torch.frequencies) for w in WINDOWS]
    assert np.allclose(np.concatenate(plain, 2), with_torch.values, atol=1e-4)


def test_gradients_are_those_of_the_loss(folder: Path) -> None:
    """The last token has no loss, so its keys and values have no gradient; others have."""
    pytest.importorskip("torch", reason="torch is not installed")
    found = samples(folder, [WINDOWS[0]]).gradients
    assert found is not None and not found[:, :, -1].any() and (np.abs(found[:, 1, :-1]).max(axis=(2, 3)) > 0).all()


@pytest.mark.parametrize("windows", [[], [[1, 2], [3]]])
def test_windows_that_are_too_short(folder: Path, windows: list[list[int]]) -> None:
    """No window, and a window of one token, are refused."""
    with pytest.raises(InvalidArgument, match="fewer than 2 tokens"):
        samples(folder, windows)
