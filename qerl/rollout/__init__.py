"""Engines that draw completions."""
