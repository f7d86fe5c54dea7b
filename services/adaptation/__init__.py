"""The adaptation service: one process for several models, away from every request.

It reads the samples that inference services keep in a record store, retrains the caches that serve on them
when the time has come or the samples say so, and publishes what is better in the model repository, where the
inference services find it. `python -m services.adaptation SETTINGS` runs it; `gati serve` starts one for the
models that have both.
"""
