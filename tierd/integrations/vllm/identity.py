"""What decides, beside tokens, which bytes vLLM has in a block of KV: weights, positions, types, kernels, and how its hashes begin.

Purpose: words for namespaces, the same for both faces. Non-purpose: groups and layouts (spaces.py, tcp/chunks.py). Invariants: what is left out changes no byte of a
block, nor the meaning of its hash; an engine's words stay what they were when it began; adapters' files are in the names of blocks, not here.
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
"""Of which it is remembered what their files were."""
ELSEWHERE = ("_name_or_path", "transformers_version")
"""Of a checkpoint's configuration, what says nothing of its KV."""


class AdapterFiles:
    """What the files of LoRA adapters were when this engine first met them, which are those that it goes on with: vLLM's hashes know an adapter's name and path
    only, and what is stored outlives both. Where a weights_digest was given it stands for adapters too."""

    def __init__(self, options: Options) -> None:
        self._is_told = bool(options.weights_digest)
        self._met: dict[tuple[str, int, str], bytes] = {}

    def stamp(self, adapter: Any) -> bytes:
        """To be added to the names of a request's blocks. adapter: its LoRARequest; b"" without one."""
        if adapter is None or self._is_told:
            return b""
        key = (adapter.lora_name, adapter.lora_int_id, adapter.lora_path)
        if adapter.load_inplace or key not in self._met:
            while len(self._met) >= ADAPTERS_MAX:
                del self._met[next(iter(self._met))]
            self._met[key] = _digest_of(adapter.lora_path)
        return self._met[key]


def engine_words() -> dict[str, Any]:
    """Of every engine of this process."""
    none_hash = bytes(getattr(kv_cache_utils, "NONE_HASH", b""))
    return {"release": ".".join(vllm.__version__.split(".")[:2]), "kernels": kernels(), "none_hash": none_hash.hex()}


def model_words(config: Any, options: Options) -> dict[str, Any]:
    """Of a VllmConfig's model."""
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
    """What decides how vLLM's kernels order the bytes inside of a block, which no layout's name tells: on CPUs the instructions that there are (AMX has K and V in
    tiles, others have K by columns), on ROCm the settings of vLLM's that choose a backend, or shuffle."""
    said: dict[str, Any] = {"device": current_platform.device_name}
    if current_platform.is_cpu():
        said |= torch.cpu.get_capabilities()
    if current_platform.is_rocm():
        said |= {name: getattr(envs, name) for name in envs.environment_variables if name.startswith("VLLM_ROCM")}
    return json.dumps(said, sort_keys=True, default=str)


@cache
def files_of(model: str) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of a local checkpoint's files, whose place may come to hold others; () of a model that is known by its name.

    As they were when they were first asked for: an engine goes on with what it has loaded.
    """
    return checkpoint.files_of(model)


def dtype_of(config: Any) -> str:
    """Of the model and of its KV."""
    return f"{config.model_config.dtype}/{config.cache_config.cache_dtype}".replace("torch.", "")


def _commit_of(model: Any) -> str:
    """Of a checkpoint from a hub, where it is known: no revision means its newest one."""
    return str(getattr(getattr(model, "hf_config", None), "_commit_hash", None) or "")


def _config_words(model: Any) -> str:
    """The checkpoint's configuration with what the user has overridden of it: keys are stored with their positions, so rotary scaling is in the bytes.

    Not where it came from, nor how long a sequence may be, but where that chooses the scaling (longrope).
    """
    config = getattr(model, "hf_config", None)
    if config is None:
        return ""
    said = {key: value for key, value in config.to_dict().items() if key not in ELSEWHERE}
    words = json.dumps(said, sort_keys=True, default=lambda value: type(value).__name__)
    return f"{words} {model.max_model_len}" if '"longrope"' in words else words


def _digest_of(adapter: str) -> bytes:
    """Of an adapter's files; of nobody else's where they cannot be looked at."""
    try:
        files = json.dumps(checkpoint.files_of(adapter, checkpoint.ADAPTER_FILES))
    except OSError:
        files = secrets.token_hex(16)
    return hashlib.sha256(files.encode()).digest()
