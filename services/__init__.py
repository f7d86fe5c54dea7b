"""Serving processes over the library. Nothing runs here yet: today Gati is a library and a command line.

The scheduler, the inference server and the adaptation worker will live in this package, and only here
will anything know of HTTP or Thrift. Imports go from here to `gati`, never back.
"""
