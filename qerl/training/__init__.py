"""The learning loop: a Lightning module, checkpoints, resume."""
