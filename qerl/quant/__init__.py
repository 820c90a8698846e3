"""What the bytes mean: packed 4-bit weight formats in pure torch."""
