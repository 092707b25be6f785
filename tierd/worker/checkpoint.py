"""Checkpoints: a Hugging Face folder (config.json, safetensors, sharded or not), or random weights.

It reads raw tensors by name, without torch; it neither computes nor uses a device. Files are mapped
read-only and nothing is executed. Opening refuses a tensor that lies outside its file, is missing
or misshapen. The digest covers the model's shape and every byte of every tensor, so checkpoints of
one digest give one KV.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierd.errors import ConfigError
from tierd.worker.spec import LlamaSpec, Shape, spec_from_config

MAX_HEADER_BYTES = 100 << 20
"""Bound of a safetensors header, as in the format's own reader."""

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as stored: kind ("F32", "F16", "BF16", "F64"), shape, little-endian bytes (uint8, mapped)."""

    kind: str
    shape: Shape
    data: NDArray[np.uint8]

    def float32(self) -> NDArray[np.float32]:
        """The values as float32 [shape]: a view of F32, else a copy. bf16 is the upper half of a float32."""
        if self.kind == "BF16":
            wide = self.data.view("<u2").astype(np.uint32)
            wide <<= 16
            return wide.view(np.float32).reshape(self.shape)
        stored = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[self.kind]
        return self.data.view(stored).astype(np.float32, copy=False).reshape(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """A model's shape and its tensors by their Hugging Face names."""

    spec: LlamaSpec
    tensors: Mapping[str, RawTensor]

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over shape, names, kinds, bytes: a namespace's weights_digest. Reads every byte once."""
        total = hashlib.sha256(json.dumps(asdict(self.spec), sort_keys=True).encode())
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            total.update(f"{name} {tensor.kind} {tensor.shape}".encode())
            total.update(tensor.data.data)
        return total.hexdigest()


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """A Hugging Face checkpoint folder, mapped. Raises ConfigError with the fault and the file."""
    place = Path(folder)
    spec = spec_from_config(_read_json(place / "config.json"))
    tensors: dict[str, RawTensor] = {}
    for name in _shards(place):
        tensors |= read_safetensors(place / name)
    return Checkpoint(spec, _checked(spec, tensors, place))


def random_checkpoint(spec: LlamaSpec, *, seed: int = 0, scale: float = 0.02) -> Checkpoint:
    """Normal weights of standard deviation `scale` (norms: ones), equal for equal spec and seed."""
    tensors = {}
    for index, (name, shape) in enumerate(spec.checked().tensor_shapes().items()):
        values = np.ones(shape, dtype="<f4")
        if len(shape) > 1:
            values = np.random.default_rng([seed, index]).standard_normal(shape, dtype=np.float32) * np.float32(scale)
        tensors[name] = RawTensor("F32", shape, values.reshape(-1).view(np.uint8))
    return Checkpoint(spec, tensors)


def read_safetensors(path: Path) -> dict[str, RawTensor]:
    """The tensors of one file, mapped. Raises ConfigError for a damaged file."""
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as fault:
        raise ConfigError(f"{path}: cannot be mapped ({fault}); is the checkpoint complete?") from fault
    length = int.from_bytes(data[:8].tobytes(), "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, len(data) - 8):
        raise ConfigError(
            f"{path}: header of {length} bytes in a file of {len(data)}; it is cut or no safetensors file"
        )
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        body = data[8 + length :]
        return {name: _tensor(entry, body) for name, entry in entries}
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise ConfigError(f"{path}: damaged header ({fault!r}); fetch the file again") from fault


def _tensor(entry: Mapping[str, Any], body: NDArray[np.uint8]) -> RawTensor:
    kind, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
    start, stop = (int(n) for n in entry["data_offsets"])
    if kind not in ITEM_BYTES:
        raise ValueError(f"tensor kind {kind} is none of {sorted(ITEM_BYTES)}")
    if not 0 <= start <= stop <= len(body) or stop - start != ITEM_BYTES[kind] * int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"bytes {start} to {stop} do not hold {kind} {shape} within {len(body)}")
    return RawTensor(kind, shape, body[start:stop])


def _shards(place: Path) -> list[str]:
    """The safetensors files of a folder: those of the index if there is one."""
    index = place / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    names = set(_read_json(index).get("weight_map", {}).values())
    strays = [name for name in names if Path(name).name != name]
    if strays or not names:
        raise ConfigError(f"{index}: names {strays or 'no file'}; shards are files beside the index")
    return sorted(names)


def _checked(spec: LlamaSpec, tensors: Mapping[str, RawTensor], place: Path) -> dict[str, RawTensor]:
    """The tensors that the model needs, in a fixed order."""
    needed = {}
    for name, shape in spec.tensor_shapes().items():
        if name not in tensors:
            raise ConfigError(f"{place}: tensor {name} is missing; the checkpoint is incomplete or no Llama")
        if tensors[name].shape != shape:
            raise ConfigError(f"{place}: tensor {name} has shape {tensors[name].shape}, config.json says {shape}")
        needed[name] = tensors[name]
    return needed


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise ConfigError(f"{path}: {fault}; a checkpoint folder holds config.json and safetensors files") from fault
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: no JSON object")
    return value
