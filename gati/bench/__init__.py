"""Gati side by side with every other way to run the same base model here."""

from gati.verb import make_verb

make_verb(__name__)
