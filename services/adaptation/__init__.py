"""The adaptation service: one process for several models, away from every request.

It reads the samples that inference services keep in a record store, retrains the serving caches on them at
intervals or when samples show the need, and publishes better ones in the model repository, where the
inference services find them. `python -m services.adaptation SETTINGS` runs it; `gati serve` starts one for
the models that have both.
"""
