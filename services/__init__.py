"""Serving processes over the library: the scheduler, inference services, the adaptation service, live pages.

Only here is anything known of HTTP and Thrift. Imports go from here to `gati`, never back.
"""
