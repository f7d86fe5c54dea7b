"""Eviction policies, and the guard."""
