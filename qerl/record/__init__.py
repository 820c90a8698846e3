"""Measurements and what becomes of them: logs, records, tables, figures."""
