"""Replaying traces: the hit rate of each policy."""
