"""What a user may set in `kv_connector_extra_config` of TierdConnector.

Purpose: names and bounds. Non-purpose: what vLLM's own configuration says. Invariant: as tierd.integrations.options.
"""

from __future__ import annotations

from pydantic import Field

from tierd.integrations.options import Options


class ConnectorOptions(Options):
    """lookup_grace_s: what the scheduler waits in a step for answers about new requests before it asks again with the next one (0: never waits);
    load_grace_s: what an engine with nothing else to do waits in a step for loads to end; save_generated: whether blocks that hold generated tokens are stored;
    retained_share: of vLLM's blocks, the most that may be kept from reuse while they are copied to tierd; what is beyond it waits for
    a later step of its request, or is not stored."""

    lookup_grace_s: float = Field(default=0.002, ge=0, le=1)
    load_grace_s: float = Field(default=0.005, ge=0, le=1)
    save_generated: bool = True
    retained_share: float = Field(default=0.5, gt=0, le=1)
