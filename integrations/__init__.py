"""Adapters for trainers and loggers, shipped as `flowscope.integrations`.

Importing this package imports none of them: import the module you need, `from flowscope.integrations.lightning import
FlowscopeCallback`.
"""
