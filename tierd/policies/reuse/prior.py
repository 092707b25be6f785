"""What to believe before anything was heard: placeholder flat hazards."""

from __future__ import annotations

import numpy as np

from tierd.policies.reuse.features import GROUPS
from tierd.policies.reuse.hazard import EDGES_S, Floats


def prior_hazards() -> Floats:
    """float64 [groups, ages]."""
    return np.tile(np.minimum(np.diff(EDGES_S) * 1e-3, 0.5), (GROUPS, 1))
