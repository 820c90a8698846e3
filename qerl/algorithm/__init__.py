"""Credit, objective and packing: pure functions."""
