"""Random traces for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from gati.evict.trace.records import Trace, make_trace
from tests.evict.naive import flat_trace, tree_trace

symbols = st.integers(0, 2)
paths = st.lists(symbols, min_size=1, max_size=5)
small_trees: st.SearchStrategy[Trace] = st.lists(paths, min_size=2, max_size=14).map(tree_trace)
long_trees: st.SearchStrategy[Trace] = st.lists(
    st.lists(symbols, min_size=1, max_size=8), min_size=20, max_size=60
).map(tree_trace)
flat_traces: st.SearchStrategy[Trace] = st.lists(st.integers(0, 7), min_size=2, max_size=40).map(flat_trace)
flat_batches: st.SearchStrategy[Trace] = st.lists(
    st.lists(st.integers(0, 7), min_size=1, max_size=4), min_size=2, max_size=20
).map(lambda rows: make_trace(rows, kind="flat"))
