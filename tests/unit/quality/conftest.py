"""A small model with random weights, as a checkpoint folder, and a text for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tierd.quality.report import open_model
from tierd.quality.windows import Lengths, Window, read_text, windows_of
from tierd.worker.checkpoint import random_checkpoint
from tierd.worker.model import Llama
from tierd.worker.spec import spec_from_config

CONFIG = {
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "bos_token_id": 256,
    "tie_word_embeddings": True,
}
SHORT = Lengths(prefix=96, continuation=32, unscored=8)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint folder. Its weights are large enough that keys and values matter."""
    place = tmp_path_factory.mktemp("model")
    (place / "config.json").write_text(json.dumps(CONFIG))
    weights = random_checkpoint(spec_from_config(CONFIG), seed=3, scale=0.3).tensors
    save_file({name: tensor.float32() for name, tensor in weights.items()}, place / "model.safetensors")
    return place


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 5,000 random bytes."""
    path = tmp_path_factory.mktemp("text") / "text"
    path.write_bytes(np.random.default_rng(2).integers(0, 256, 5000, np.uint8).tobytes())
    return path


@pytest.fixture(scope="session")
def model(folder: Path) -> Llama:
    """The model."""
    return open_model(folder)


@pytest.fixture(scope="session")
def windows(text: Path, folder: Path) -> list[Window]:
    """Three short windows."""
    return windows_of(read_text(text, folder, CONFIG["vocab_size"]), 3, SHORT)
