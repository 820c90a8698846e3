"""Reinforcement learning of language models on one GPU over frozen 4-bit weights."""
