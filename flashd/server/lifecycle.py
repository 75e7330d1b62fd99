"""From configuration to a serving process, and to its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
import uvloop

from flashd import __version__
from flashd.config import DaemonConfig
from flashd.errors import FlashdError, RequestError
from flashd.runtime.build import Runtime, build
from flashd.server.app import AppState, create_app
from flashd.server.listener import Listener
from flashd.server.registry import Registration, log_file
from flashd.store.open import read_manifest

log = logging.getLogger("flashd.server")

# What is left of two seconds after the default drain, for streams to close and reads to settle.
_CLOSE_S = 0.7
# What ends the daemon.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the daemon decides when serving ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(config: DaemonConfig, on_ready: Callable[[dict[str, Any]], None]) -> None:
    """Serve a model until SIGTERM or SIGINT.

    Args:
        config: what to serve and where.
        on_ready: called once with the daemon's record when the model is loaded.

    Raises:
        SocketError: the socket cannot be had.
        BundleError, TokenizerError: the model cannot be served.
    """
    _log_to_stderr(config.log_level)
    read_manifest(config.model_dir)  # a wrong directory is told before a socket is made
    record: dict[str, Any] = {
        "pid": os.getpid(),
        "socket": str(config.socket_path),
        "model": config.served_name,
        "directory": str(config.model_dir),
        "started_unix_s": time.time(),
        "log": str(log_file(config.socket_path)),
        "settings": config.settings(),
    }
    with contextlib.ExitStack() as owned:
        listener = owned.enter_context(contextlib.closing(Listener(config.socket_path, record)))
        owned.enter_context(contextlib.closing(Registration(config.socket_path)))
        log.info("flashd %s starting, pid %d", __version__, os.getpid())
        # An exception out of a handler would hit the event loop while it is being made.
        early: list[int] = []
        for number in _ENDING:
            signal.signal(number, lambda number, _: early.append(number))
        uvloop.run(_Daemon(config, listener, record, on_ready, early).run())
    log.info("stopped")


def _log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])


@dataclass
class _Daemon:
    config: DaemonConfig
    listener: Listener
    record: dict[str, Any]
    on_ready: Callable[[dict[str, Any]], None]
    early: list[int]  # signals that came before the loop

    async def run(self) -> None:
        """Load, serve until a signal, and end in order."""
        stop, force = self._signals()
        state = AppState(self.config.served_name)
        http = _HttpServer(
            uvicorn.Config(
                create_app(state),
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        serving = asyncio.create_task(http.serve(sockets=[self.listener.socket]))
        loading = asyncio.create_task(build(self.config))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                await self._serve(state, loading.result(), stop, force)
        finally:
            stopping.cancel()
            http.should_exit = True
            await asyncio.wait({serving}, timeout=_CLOSE_S)
            http.force_exit = True
            await serving
            loading.cancel()  # what it has begun runs on threads that nobody waits for
            if loading.done() and not loading.cancelled() and loading.exception() is None:
                await loading.result().close()

    async def _serve(
        self, state: AppState, runtime: Runtime, stop: asyncio.Event, force: asyncio.Event
    ) -> None:
        engine = runtime.engine
        running = asyncio.create_task(engine.run())
        watching = asyncio.create_task(runtime.memory.run())
        state.attach(runtime)
        # What was loaded stays: without this, each full collection walks over it for some 10 ms of
        # every answer's time.
        gc.collect()
        gc.freeze()
        log.info("ready: %s on %s", self.config.served_name, self.config.socket_path)
        self.on_ready(self.record)
        waiting = asyncio.create_task(stop.wait())
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if running.done():
            running.result()  # the engine never returns: this raises what ended it
        log.info("stopping: up to %d ms for running answers", self.config.drain_ms)
        engine.refuse_new()
        await _first_of(engine.idle.wait(), force.wait(), timeout_s=self.config.drain_ms / 1000)
        engine.close(RequestError("the daemon is shutting down", code="shutting_down", status=503))
        await _first_of(engine.idle.wait(), timeout_s=_CLOSE_S)
        for task in (running, watching):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, FlashdError):
                await task

    def _signals(self) -> tuple[asyncio.Event, asyncio.Event]:
        """Events for the first and the second signal that ends the daemon.

        SIGHUP is what a terminal sends when it closes. SIGUSR1 and SIGUSR2 mean nothing here.
        """
        stop, force = asyncio.Event(), asyncio.Event()

        def received() -> None:
            (force if stop.is_set() else stop).set()

        loop = asyncio.get_running_loop()
        for number in _ENDING:
            loop.add_signal_handler(number, received)
        if self.early:
            received()
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        return stop, force


async def _first_of(*waits: Coroutine[Any, Any, object], timeout_s: float) -> None:
    """Return when one of the waits ends, or after the time limit."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
