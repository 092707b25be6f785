"""vLLM's entry point `vllm.general_plugins`: registers TierdConnector by name.

Users may then omit `kv_connector_module_path`. vLLM loads the connector only when a user names it;
an unsupported version is refused then. Every vLLM process with tierd installed calls this. So it
imports nothing of tierd and never raises for an unknown version.
"""

from __future__ import annotations

import contextlib


def register() -> None:
    """Called by vLLM in each of its processes, more than once in some."""
    with contextlib.suppress(ImportError, AttributeError, ValueError):  # not in this vLLM; registered already
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

        KVConnectorFactory.register_connector("TierdConnector", "tierd.integrations.vllm", "TierdConnector")
