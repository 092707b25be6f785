"""SGLang's start options that decide the bytes of KV and that no host pool shows.

They are words for the namespace; pools and ranks are in names.py. An option that is not published,
as outside of an engine, is no word. With a weights_digest, the location of the weights is no word.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_context

from tierd.integrations.checkpoint import ADAPTER_FILES, files_of
from tierd.integrations.options import Options

MODEL = (
    "kv_cache_dtype",
    "quantization",
    "quantization_param_path",
    "json_model_override_args",
    "qsa_indexer_dtype",
)
"""The KV's type is here because pools hold every kind of fp8 as uint8."""
DRAFT = (
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
    "speculative_draft_kv_cache_dtype",
)
"""A draft's KV lies in the target's pages, or beside them under the same keys."""
WEIGHTS = ("revision", "load_format")


def started(options: Options) -> dict[str, Any]:
    """Words of this process's engine. Its model name is SGLang's served name, which may change meaning."""
    model = _namespace("model")
    words = _leaves(model, MODEL) | _leaves(_namespace("spec"), DRAFT)
    if options.weights_digest:
        return words
    path = str(getattr(model, "model_path", ""))
    named = {} if options.model else {"model_path": path}
    return words | named | _leaves(model, WEIGHTS) | {"files": files_of(path) if path else (), "adapters": _adapters()}


def _adapters() -> list[Any]:
    """Files of the local adapters in --lora-paths. SGLang's keys contain an id made of name and
    path; an adapter loaded later has a unique id."""
    paths = {str(one.lora_path) for one in getattr(_namespace("lora"), "lora_paths", None) or ()}
    return [(path, files) for path in sorted(paths) if (files := files_of(path, ADAPTER_FILES))]


def _namespace(name: str) -> Any:
    context = get_context()
    return context.config_bag(name) if context.is_config_namespace_published(name) else None


def _leaves(namespace: Any, names: tuple[str, ...]) -> dict[str, str]:
    return {name: str(getattr(namespace, name)) for name in names if hasattr(namespace, name)}
