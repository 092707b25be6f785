"""vLLM's entry point `vllm.general_plugins`: makes TierdConnector known by name, so that `kv_connector_module_path` may be left out.

Purpose: one registration. Non-purpose: loading the connector; vLLM does when a user names it, and an unsupported version is refused then. Invariants: every
vLLM process with tierd beside it calls this, so it imports nothing of ours and never raises for a version that it does not know.
"""

from __future__ import annotations

import contextlib


def register() -> None:
    """Called by vLLM in each of its processes, more than once in some."""
    with contextlib.suppress(ImportError, AttributeError, ValueError):  # not in this vLLM; registered already
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

        KVConnectorFactory.register_connector("TierdConnector", "tierd.integrations.vllm", "TierdConnector")
