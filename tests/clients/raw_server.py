"""A server that plays exact bytes over a real Unix socket: what no well-behaved server sends on demand."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAIT_FOR_CLIENT_CLOSE = object()
ABORT = object()  # close at once, whatever was promised
Step = bytes | float | object


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: Any


def answer(body: Any, status: int = 200, **headers: str) -> bytes:
    """A whole JSON answer."""
    raw = json.dumps(body).encode()
    extra = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = (
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n{extra}\r\n"
    )
    return head.encode() + raw


def error(status: int, message: str, code: str | None = None, **headers: str) -> bytes:
    """An error object as the daemon sends it."""
    fields = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return answer({"error": fields}, status, **headers)


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n"
)
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


def piece(text: str, finish: str | None = None, tokens: list[int] | None = None) -> bytes:
    """One chunk of ``/v1/completions``."""
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
    if tokens is not None:
        choice["tokens"] = tokens
    return event({"id": "cmpl-1", "model": "tiny", "choices": [choice]})


def delta(text: str | None, finish: str | None = None) -> bytes:
    """One chunk of ``/v1/chat/completions``; None is the first one, which only names the role."""
    fields = {"role": "assistant"} if text is None else {"content": text}
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    return event({"id": "chat-1", "model": "tiny", "choices": [choice]})


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return event({"id": "x-1", "model": "tiny", "choices": [], "usage": counts})


class RawServer:
    """Answers the n-th request with the n-th queued list of steps, then closes that connection."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests: list[Request] = []
        self.client_closed = threading.Event()
        self._replies: deque[tuple[Step, ...]] = deque()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(os.fspath(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def reply(self, *steps: Step) -> None:
        """Queue one answer: bytes are sent, numbers are seconds to sleep."""
        self._replies.append(steps)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # A client may leave before everything is sent.
        left = suppress(BrokenPipeError, ConnectionResetError)
        with connection, connection.makefile("rb") as reader, left:
            connection.settimeout(20)
            method, path, _ = reader.readline().decode().split()
            headers: dict[str, str] = {}
            while line := reader.readline().strip().decode():
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            raw = reader.read(int(headers.get("content-length", 0)))
            self.requests.append(Request(method, path, headers, json.loads(raw) if raw else None))
            for step in self._replies.popleft():
                if isinstance(step, bytes):
                    connection.sendall(step)
                elif isinstance(step, float):
                    time.sleep(step)
                elif step is WAIT_FOR_CLIENT_CLOSE and connection.recv(1) == b"":
                    self.client_closed.set()
