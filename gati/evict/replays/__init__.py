"""Replaying traces: what each policy would have hit."""
