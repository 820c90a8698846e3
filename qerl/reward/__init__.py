"""Verdicts and rewards; text is untrusted here."""
