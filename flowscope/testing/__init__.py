"""Contracts as functions: run them on a class of your own, as scikit-learn's `check_estimator`.

flowscope.testing.check_connection(LayerScale, init=0.1)      # raises AssertionError: which model, which promise
flowscope.testing.check_detector(HeadNorm)                    # likewise: which records, which promise
flowscope.testing.check_instrument(ThirdMoment)
"""

from __future__ import annotations

from flowscope.testing.connection import check_connection
from flowscope.testing.detector import check_detector
from flowscope.testing.instrument import check_instrument

__all__ = ["check_connection", "check_detector", "check_instrument"]
