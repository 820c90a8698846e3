"""4-bit kernels for Hopper: packed layout, W4A16 matmuls, attention, sampling, fused steps."""
