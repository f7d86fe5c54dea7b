"""Running a network with learned caches: the engine, its backends, and their graphs."""
