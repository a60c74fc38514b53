"""Contracts as functions: run them on a class of your own, as scikit-learn's `check_estimator`.

flowscope.testing.check_connection(LayerScale, init=0.1)      # raises AssertionError: which model, which promise
"""

from __future__ import annotations

from flowscope.testing.connection import check_connection

__all__ = ["check_connection"]
