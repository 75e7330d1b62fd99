"""Blocking work off the event loop, on threads that nothing has to wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(fn: Callable[..., T], *args: Any) -> T:
    """Run ``fn(*args)`` on a thread of its own and return its result.

    Unlike ``asyncio.to_thread``, neither the loop's end nor the interpreter's waits for the thread:
    a daemon that is told to stop while it loads a model or tokenizes a book stops.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = fn(*args)
        except StopIteration as exc:  # a future refuses to carry it
            error = RuntimeError(f"{exc!r} came out of {fn!r}")
        except BaseException as exc:
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name="flashd-background", daemon=True).start()
    return await future
