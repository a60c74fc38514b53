"""How tensors become sums, where the sums wait, how they add up, and the metrics that are made of them on the host."""
