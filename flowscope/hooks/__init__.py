"""The rooms that touch autograd: which call of a module is this, and what is deposited at its point."""
