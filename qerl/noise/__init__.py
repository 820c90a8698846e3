"""Adaptive quantisation noise (AQN) on the sampler's norms."""
