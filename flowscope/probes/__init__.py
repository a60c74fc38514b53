"""What observes a model: pure statistics, the hooks that deposit them in backward, and the optimizer-step statistics."""
