"""Prompts: where problems come from and how they become tokens."""
