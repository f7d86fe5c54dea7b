"""What is told of somebody else's exception: one line, never none."""

from __future__ import annotations

import pytest

from gati.errors import first_line, one_line


@pytest.mark.parametrize(
    ("error", "first", "whole"),
    [
        (ValueError("no number\nat line 3"), "no number", "ValueError: no number"),
        (KeyError(), "KeyError", "KeyError"),
        (RuntimeError("\n"), "RuntimeError", "RuntimeError"),
        (RuntimeError("a" * 1000), "a" * 200, "RuntimeError: " + "a" * 200),
    ],
)
def test_an_exception_is_told_in_one_line(error: Exception, first: str, whole: str) -> None:
    assert first_line(error) == first
    assert one_line(error) == whole
