"""The decoder of server-sent events, byte by byte."""

from __future__ import annotations

import itertools

import pytest
from flashd_client import InvalidResponse
from flashd_client._sse import MAX_EVENT_BYTES, Event, EventDecoder
from hypothesis import given
from hypothesis import strategies as st


def decode(*chunks: bytes) -> list[Event]:
    decoder = EventDecoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"data: a\n\n", [("message", "a")]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [("message", "a"), ("message", "b")]),
        (b"data: a\r\rdata: b\r\r", [("message", "a"), ("message", "b")]),
        (b"data: a\ndata: b\ndata:\n\n", [("message", "a\nb\n")]),
        (b": ping\n\n: ping\r\n\r\ndata: a\n\n", [("message", "a")]),
        (b"event: error\ndata: x\n\ndata: y\n\n", [("error", "x"), ("message", "y")]),
        (b"id: 7\nretry: 3\nnonsense\ndata: a\n\n", [("message", "a")]),
        (b"data:  two spaces\n\n", [("message", " two spaces")]),
        (b"data\n\n", [("message", "")]),
        (b"event: lonely\n\n", []),
        (b"data: cut off", []),
        (b"data: cut off\n", []),
        (b"\xef\xbb\xbfdata: after a BOM\n\n", [("message", "after a BOM")]),
        ("data: grüße 🦙\n\n".encode(), [("message", "grüße 🦙")]),
    ],
)
def test_events(raw: bytes, expected: list[tuple[str, str]]) -> None:
    events = [Event(name, data) for name, data in expected]
    assert decode(raw) == events
    assert decode(*(raw[i : i + 1] for i in range(len(raw)))) == events


LINE = st.sampled_from(
    ["", "data: x", "data: é🦙", "data", ": ping", "event: e", 'data: {"a": 1}', "id: 1", "data:\u2028y"]
)
STREAM = st.lists(st.tuples(LINE, st.sampled_from(["\n", "\r\n"])), max_size=20)


@given(STREAM, st.lists(st.integers(0, 300), max_size=10))
def test_chunk_boundaries_do_not_matter(lines: list[tuple[str, str]], cuts: list[int]) -> None:
    raw = "".join(line + end for line, end in lines).encode()
    places = [0, *sorted(min(cut, len(raw)) for cut in cuts), len(raw)]
    pieces = [raw[a:b] for a, b in itertools.pairwise(places)]
    assert decode(*pieces) == decode(raw)


def test_line_and_paragraph_separators_are_text() -> None:
    assert decode("data: a\u2028b\x0bc\x85d\n\n".encode()) == [Event("message", "a\u2028b\x0bc\x85d")]


def test_bytes_that_are_not_utf8() -> None:
    with pytest.raises(InvalidResponse, match="UTF-8"):
        decode(b"data: \xff\n\n")


@pytest.mark.parametrize(
    "raw", [b"data: " + b"x" * MAX_EVENT_BYTES, (b"data: " + b"x" * 1020 + b"\n") * (16 << 10)]
)
def test_an_endless_event_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidResponse, match="larger than"):
        decode(raw)
