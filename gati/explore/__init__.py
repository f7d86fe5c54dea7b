"""Train and measure every variant at every block, and write the cache library."""

from gati.verb import make_verb

make_verb(__name__)
