"""The core's per-block record of the attention that kernels report."""

from __future__ import annotations

import numpy as np

from tests.unit.core.kit import HOST, Kit, chain, group, tier
from tierd.core.requests.attention import MOST_MASS


def test_mass_that_no_float32_holds_is_as_much_as_one_does() -> None:
    """The core caps the mass at MOST_MASS, so reports whose sum exceeds a float32 raise nothing."""
    kit, a = Kit(tier(HOST, 8, eviction="attention")), chain("a", 2)
    kit.put(a)
    most, lease = np.finfo(np.float32).max, kit.acquire(group(a)).lease
    for _ in range(2):
        kit.core.report_attention(1, lease=lease, group=0, mass=np.array([most, 1.0], np.float32), now=kit.tick())
    assert kit.core._index.blocks.attention[kit.ids(a)].tolist() == [np.float32(MOST_MASS), 2.0]
    assert np.isfinite(kit.core._index.policies[0]._mass).all()  # type: ignore[attr-defined]
