"""Choosing which learned caches serve together, and certifying their agreement."""
