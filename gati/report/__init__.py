"""One self-contained HTML page about a cache library."""

from gati.verb import make_verb

make_verb(__name__)
