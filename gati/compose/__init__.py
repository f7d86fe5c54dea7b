"""Choosing which learned caches serve together, and proving what they promise."""

from gati.verb import make_verb

make_verb(__name__)
