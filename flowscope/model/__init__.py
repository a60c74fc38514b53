"""Where to look: the depth axis of a model (flows) and the merges of its residual branches (sites)."""
