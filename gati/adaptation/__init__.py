"""Keeping learned caches right while the world changes: audits, the guard, and what follows an alarm."""
