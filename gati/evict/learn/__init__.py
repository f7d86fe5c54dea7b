"""Learning away from the engine: it logs its accesses, a service fits and publishes, it follows."""
