"""Reads that a thread waits for by itself, while the event loop does them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import wait
from typing import Any

from flashd.disk.engine import FOREVER_S, ReadTicket
from flashd.errors import FlashdError


class LoopTicket(ReadTicket):
    """A coroutine that reads, on an event loop that runs in another thread.

    Args:
        read: what the loop shall do.
        loop: open; where it stops before the read ends, waiting never ends.

    Raises:
        RuntimeError: the loop is closed.
    """

    def __init__(self, read: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._future = asyncio.run_coroutine_threadsafe(read, loop)
        except RuntimeError:
            read.close()
            raise

    def wait(self, timeout_s: float = FOREVER_S) -> bool:
        """See ``ReadTicket.wait``."""
        if not self._future.done() and not wait([self._future], timeout_s).done:
            return False
        self._future.result()
        return True


class LayerTicket(ReadTicket):
    """Another one, whose errors name the layer beside file and offset.

    Args:
        inner: the other one.
        layer: of the rows.
    """

    __slots__ = ("_inner", "_layer", "checked")

    def __init__(self, inner: ReadTicket, layer: int) -> None:
        self._inner = inner
        self._layer = layer
        self.checked = None

    def wait(self, timeout_s: float = FOREVER_S) -> bool:
        """See ``ReadTicket.wait``."""
        inner = self._inner
        try:
            over = inner.wait(timeout_s)
        except Exception as exc:
            raise of_layer(exc, self._layer) from exc
        self.checked = inner.checked
        return over


def of_layer(error: Exception, layer: int) -> Exception:
    """The same error; one of a read names the layer beside file and offset."""
    return type(error)(f"{error} (layer {layer})") if isinstance(error, FlashdError) else error
