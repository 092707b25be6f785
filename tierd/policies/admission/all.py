"""All: writes every block but short last ones, for drives whose wear does not matter."""

from __future__ import annotations

from tierd.policies.admission.gate import Gate


class All(Gate):
    """Writes every full block, within the wear budget."""
