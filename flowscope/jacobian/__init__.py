"""`jacobian_spectrum`: singular values of the Jacobian of the last hidden state by the first."""
