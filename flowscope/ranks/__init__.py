"""Many processes, one record: which ranks train a model together, and the sum of what they deposited."""
