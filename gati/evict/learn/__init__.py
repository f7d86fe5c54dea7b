"""Learning outside the engine: it logs accesses, a service fits predictors, and the engine loads them."""
