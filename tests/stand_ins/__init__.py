"""Trainers in place of packages that are not installed: what their callbacks are called with, in which order.

Each file has `MODULES`, by path and name, with as much of the package as `tests/test_adapters.py` uses. That a stand-in
calls as the package does is recorded in `tests/test_adapters.py` (CONTRACTS), and compared with it where it is
installed.
"""
