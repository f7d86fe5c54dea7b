"""The server processes: scheduler; inference, adaptation and eviction services; completions; live pages.

Only this package knows HTTP and Thrift. It imports `gati`; `gati` never imports it.
"""
