"""What observes a model: pure statistics, the hooks that deposit them in backward, what the optimizer's step shows."""
