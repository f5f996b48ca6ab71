"""Kernels of one decoding step, and the definition of how a token is sampled."""
