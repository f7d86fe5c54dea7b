"""The serving processes: scheduler, inference services, adaptation service, eviction service, live pages.

Only this package knows HTTP and Thrift. It imports `gati`; `gati` never imports it.
"""
