"""Server-sent events (WHATWG HTML, section 9.2.6) out of a stream of bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from flashd_client.errors import InvalidResponse

MAX_EVENT_BYTES = 16 << 20
_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, slots=True)
class Event:
    """One event: its name (``message`` unless the server says otherwise) and its data."""

    name: str
    data: str


class EventDecoder:
    """Incremental decoder. Lines are decoded as a whole, so chunks may split a character."""

    def __init__(self) -> None:
        self._pending = bytearray()  # bytes of a line whose end has not come yet
        self._searched = 0  # of these, how many hold no line end
        self._after_cr = False  # the last byte seen was a CR: a LF now belongs to it
        self._first_line = True
        self._name = ""
        self._data: list[str] = []
        self._data_bytes = 0

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Events that ``chunk`` completes. Exhaust the iterator before feeding again.

        Raises:
            InvalidResponse: bytes that are not UTF-8, or an event beyond ``MAX_EVENT_BYTES``.
        """
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        self._pending += chunk
        start = 0
        while end := _LINE_END.search(self._pending, max(start, self._searched)):
            line = bytes(self._pending[start : end.start()])
            start = end.end()
            self._after_cr = end.group() == b"\r" and start == len(self._pending)
            if (event := self._line(line)) is not None:
                yield event
        del self._pending[:start]
        self._searched = len(self._pending)
        self._check_size()

    def _check_size(self) -> None:
        if len(self._pending) + self._data_bytes > MAX_EVENT_BYTES:
            raise InvalidResponse(f"an event of the stream is larger than {MAX_EVENT_BYTES} bytes")

    def _line(self, raw: bytes) -> Event | None:
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as exc:
            raise InvalidResponse(f"the stream is not UTF-8 ({exc})") from exc
        if self._first_line:
            self._first_line = False
            line = line.removeprefix("\ufeff")
        if not line:
            return self._dispatch()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
            self._data_bytes += len(raw)
            self._check_size()
        elif field == "event":
            self._name = value
        return None  # comments (an empty field), id, retry and unknown fields mean nothing here

    def _dispatch(self) -> Event | None:
        data, name = self._data, self._name
        self._data, self._name, self._data_bytes = [], "", 0
        return Event(name or "message", "\n".join(data)) if data else None
