"""A calibration: what codecs know of a model before they see a block. Made once per model.

`make` fits each codec's tensors to samples of the model's keys and values. A file has the
tensors in safetensors format. Its hash covers shape, frequencies and tensors. Encoded blocks name
the hash, so a block is never decoded with another calibration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, numpy, safe_open

from tierd.codecs.rope import Frequencies
from tierd.codecs.values import Floats
from tierd.core.formats.block import KVGeometry
from tierd.errors import CorruptRecord

Tensors = Mapping[str, NDArray[Any]]
VERSION = 1
FREQUENCIES = "rope.frequencies"


@dataclass(frozen=True, slots=True)
class Samples:
    """Keys before RoPE and values of calibration text, as float32 [layers, 2, tokens, kv_heads, head_dim].

    gradients: of the loss by each of them, same shape. None: no torch. Then two others stand in.
    queries: before RoPE, float32 [layers, queries, q_heads, head_dim].
    outputs: weights after attention, float32 [layers, hidden, q_heads * head_dim].
    """

    geometry: KVGeometry
    frequencies: Frequencies
    values: Floats
    gradients: Floats | None = None
    queries: Floats | None = None
    outputs: Floats | None = None


@dataclass(frozen=True)
class Calibration:
    """tensors: "<codec>.<name>" -> an array, as the codec's `fit` made it."""

    geometry: KVGeometry
    tensors: Tensors

    @property
    def frequencies(self) -> Frequencies:
        """Of RoPE: float64 [pairs of channels]."""
        return self.tensors[FREQUENCIES]

    @cached_property
    def hash(self) -> bytes:
        """16 bytes over shape, names, dtypes and values."""
        total = hashlib.sha256(_metadata(self.geometry)["tierd"].encode())
        for name in sorted(self.tensors):
            array = np.ascontiguousarray(self.tensors[name])
            total.update(f"{name} {array.dtype.str} {array.shape}".encode())
            total.update(array.tobytes())
        return total.digest()[:16]

    @cached_property
    def derived(self) -> dict[str, Any]:
        """Made by a codec of its tensors once, under the codec's name."""
        return {}

    def save(self, path: Path) -> None:
        """Writes the file. Raises OSError."""
        arrays = {name: np.ascontiguousarray(array) for name, array in self.tensors.items()}
        path.write_bytes(numpy.save(arrays, _metadata(self.geometry) | {"hash": self.hash.hex()}))


def load(path: Path) -> Calibration:
    """A calibration from its file. Raises OSError, CorruptRecord if its contents are not one."""
    try:
        with safe_open(path, "numpy") as file:
            said = json.loads(file.metadata()["tierd"])
            if said.pop("version") != VERSION:
                raise CorruptRecord(f"calibration {path}: version is not {VERSION}; make it again")
            found = Calibration(KVGeometry(**said), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
            wanted = file.metadata()["hash"]
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CorruptRecord(f"calibration {path}: no calibration of tierd ({error}); make it again") from None
    if found.hash.hex() != wanted:
        raise CorruptRecord(f"calibration {path}: its hash is {found.hash.hex()}, it says {wanted}; make it again")
    return found


def _metadata(geometry: KVGeometry) -> dict[str, str]:
    g = geometry
    said = {"version": VERSION, "layers": g.layers, "kv_heads": g.kv_heads, "head_dim": g.head_dim}
    return {"tierd": json.dumps(said | {"dtype": g.dtype, "layout": g.layout}, sort_keys=True)}
