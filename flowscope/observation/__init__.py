"""The instruments of one model together: what they are told of a step, and how what they saw becomes a record."""
