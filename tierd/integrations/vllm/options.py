"""Options of TierdConnector in vLLM's `kv_connector_extra_config`.

Names and bounds are checked as in tierd.integrations.options.
"""

from __future__ import annotations

from pydantic import Field

from tierd.integrations.options import Options


class ConnectorOptions(Options):
    """lookup_grace_s: longest wait of the scheduler in a step for lookups; it asks again in the next.
    load_grace_s: an idle engine's longest wait in a step for loads.
    step_load_s: expected time of the loads from memory, all together, that may run in the step that
    computes with them. 0: none.
    load_deadline_s: another load ends after this or the time to compute its tokens, whichever is
    longer, and at timeout_s.
    save_generated: whether to store blocks with generated tokens.
    retained_share: the most of vLLM's blocks kept from reuse while copied. Saves beyond it wait for
    a later step of their request, or are dropped."""

    lookup_grace_s: float = Field(default=0.002, ge=0, le=1)
    load_grace_s: float = Field(default=0.005, ge=0, le=1)
    step_load_s: float = Field(default=0.005, ge=0, le=1)
    load_deadline_s: float = Field(default=0.25, gt=0)
    save_generated: bool = True
    retained_share: float = Field(default=0.5, gt=0, le=1)
