"""Everything besides tokens that decides the bytes of a vLLM block.

These are weights, positions, types, kernels, and the start of vLLM's hashes. Both integrations use
them as words of namespaces. Groups and layouts are in spaces.py and chunks.py. An omitted word
changes neither a block's bytes nor its hash's meaning. An engine's words never change after its
start. Files of adapters are part of block names and not of these words.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from functools import cache
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils

from tierd.integrations import checkpoint
from tierd.integrations.options import Options

ADAPTERS_MAX = 4096
"""The most adapters whose files are remembered."""
ELSEWHERE = ("_name_or_path", "transformers_version")
"""Entries of a checkpoint's configuration that do not affect its KV."""


class AdapterFiles:
    """LoRA adapters' files as this engine first met them; it keeps using those. Hashes of vLLM
    contain only an adapter's name and path, and stored blocks outlive both. A weights_digest, if
    given, covers adapters too."""

    def __init__(self, options: Options) -> None:
        self._has_digest = bool(options.weights_digest)
        self._met: dict[tuple[str, int, str], bytes] = {}

    def stamp(self, adapter: Any) -> bytes:
        """Bytes to add to the names of a request's blocks; b"" without an adapter, its LoRARequest."""
        if adapter is None or self._has_digest:
            return b""
        key = (adapter.lora_name, adapter.lora_int_id, adapter.lora_path)
        if adapter.load_inplace or key not in self._met:
            while len(self._met) >= ADAPTERS_MAX:
                del self._met[next(iter(self._met))]
            self._met[key] = _digest_of(adapter.lora_path)
        return self._met[key]


def engine_words() -> dict[str, Any]:
    """Words of every engine in this process."""
    none_hash = bytes(getattr(kv_cache_utils, "NONE_HASH", b""))
    return {"release": ".".join(vllm.__version__.split(".")[:2]), "kernels": kernels(), "none_hash": none_hash.hex()}


def model_words(config: Any, options: Options) -> dict[str, Any]:
    """Words for the model of a VllmConfig."""
    model = config.model_config
    return {
        "revision": model.revision,
        "files": () if options.weights_digest else (*files_of(model.model), _commit_of(model)),
        "config": _config_words(model),
        "quantization": str(model.quantization),
        "dtype": dtype_of(config),
        "attention": str(getattr(getattr(config, "attention_config", None), "backend", None)),
    }


@cache
def kernels() -> str:
    """Facts that decide the order of bytes inside a block and that no layout's name shows. On CPUs
    these are the instructions: AMX keeps K and V in tiles, others K by columns. On ROCm they are
    vLLM's settings that choose a backend or shuffle."""
    said: dict[str, Any] = {"device": current_platform.device_name}
    if current_platform.is_cpu():
        said |= torch.cpu.get_capabilities()
    if current_platform.is_rocm():
        said |= {name: getattr(envs, name) for name in envs.environment_variables if name.startswith("VLLM_ROCM")}
    return json.dumps(said, sort_keys=True, default=str)


@cache
def files_of(model: str) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of a local checkpoint's files; () for a model known only by its name.

    The directory may come to hold other files, but an engine keeps what it loaded. So the result of
    the first call is kept.
    """
    return checkpoint.files_of(model)


def dtype_of(config: Any) -> str:
    """Types of the model and of its KV."""
    return f"{config.model_config.dtype}/{config.cache_config.cache_dtype}".replace("torch.", "")


def _commit_of(model: Any) -> str:
    """The commit of a checkpoint from a hub, if known: without a revision the hub serves its newest."""
    return str(getattr(getattr(model, "hf_config", None), "_commit_hash", None) or "")


def _config_words(model: Any) -> str:
    """The checkpoint's configuration with the user's overrides.

    Keys are stored with their positions, so rotary scaling changes the bytes. The checkpoint's
    origin and the longest sequence are excluded, unless the length chooses the scaling (longrope).
    """
    config = getattr(model, "hf_config", None)
    if config is None:
        return ""
    said = {key: value for key, value in config.to_dict().items() if key not in ELSEWHERE}
    words = json.dumps(said, sort_keys=True, default=lambda value: type(value).__name__)
    return f"{words} {model.max_model_len}" if '"longrope"' in words else words


def _digest_of(adapter: str) -> bytes:
    """Digest of an adapter's files; a random one if they cannot be read."""
    try:
        files = json.dumps(checkpoint.files_of(adapter, checkpoint.ADAPTER_FILES))
    except OSError:
        files = secrets.token_hex(16)
    return hashlib.sha256(files.encode()).digest()
