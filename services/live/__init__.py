"""The live page: shows in a browser what a stream or a server is doing."""

from services.live.page import RunningPage, live_router, serve_page
from services.live.state import LiveSink, LiveState

__all__ = ["LiveSink", "LiveState", "RunningPage", "live_router", "serve_page"]
