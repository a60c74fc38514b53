"""Many processes, one record: which ranks train a model together, and the all-reduce of what they deposited."""
