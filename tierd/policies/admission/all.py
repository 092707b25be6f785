"""Everything is written but short last blocks: the admission of a drive that nobody has to spare."""

from __future__ import annotations

from tierd.policies.admission.gate import Gate


class All(Gate):
    """Whatever is full, within the wear budget."""
