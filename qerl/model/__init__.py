"""One decoder, for learning and for sampling."""
