"""Choosing which learned caches serve together, and proving what they promise."""
