"""The live page: what a stream or a server does now, in a browser."""

from services.live.page import RunningPage, live_router, serve_page
from services.live.sink import LiveSink
from services.live.state import LiveState

__all__ = ["LiveSink", "LiveState", "RunningPage", "live_router", "serve_page"]
