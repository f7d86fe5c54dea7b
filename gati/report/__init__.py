"""One self-contained HTML page about a cache library."""
