"""Thrift between Gati's services: one connection carries many calls, answers come in any order.

`gen` is written by the Thrift compiler. The messages are those of its framed binary protocol, so clients in
any language work; what the library does with threads is done here with asyncio.
"""
