"""Admission policies by the names in settings. They keep `tierd.core.admission.Admission`.

A new one is a file here, a line in ADMISSION, and passes `tests/contract/test_admission.py`, which
runs over the dict.
"""

from __future__ import annotations

from collections.abc import Callable

from tierd.core.admission import Admission, Chance
from tierd.core.formats.model import TierSpec
from tierd.core.index.blocks import Blocks
from tierd.policies.admission.all import All
from tierd.policies.admission.learned import Learned
from tierd.policies.admission.second_touch import SecondTouch
from tierd.policies.admission.tinylfu import TinyLfu

ADMISSION: dict[str, Callable[[TierSpec, Blocks, Chance | None], Admission]] = {
    "all": All,
    "learned": Learned,
    "second-touch": SecondTouch,
    "tinylfu": TinyLfu,
}
"""Name -> maker. A learner gives the chance of another use; None stands for certainty."""
