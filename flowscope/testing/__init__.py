"""Contracts as functions: run them on a class of your own, as scikit-learn's `check_estimator`.

flowscope.testing.check_connection(ScaledBranch, init=0.1)      # raises AssertionError: which model, which promise
flowscope.testing.check_detector(HeadNorm)                    # likewise: which records, which promise
flowscope.testing.check_instrument(ThirdMoment)
flowscope.testing.assert_trains(model, loss, batches)         # of a model: flowscope.check, in a test
"""

from __future__ import annotations

from flowscope.testing.connection import check_connection
from flowscope.testing.detector import check_detector
from flowscope.testing.instrument import check_instrument
from flowscope.testing.trained_model import assert_trains

__all__ = ["assert_trains", "check_connection", "check_detector", "check_instrument"]
