"""Makes a calibration: the tensors of every codec that needs one."""

from __future__ import annotations

import numpy as np

from tierd.codecs import transform_fit
from tierd.codecs.calibration import FREQUENCIES, Calibration, Samples

FITS = (transform_fit.fit,)


def make(samples: Samples) -> Calibration:
    """Fits each codec to samples. Takes minutes for large models."""
    tensors = {FREQUENCIES: np.asarray(samples.frequencies, np.float64)}
    for fit in FITS:
        tensors |= fit(samples)
    return Calibration(samples.geometry, tensors)
