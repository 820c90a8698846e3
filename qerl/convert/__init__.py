"""From a checkpoint to packed weights on disk, and out again."""
