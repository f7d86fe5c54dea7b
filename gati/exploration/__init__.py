"""Train and measure every variant at every block, and write the cache library."""
