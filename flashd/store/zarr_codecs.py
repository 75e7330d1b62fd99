"""zarr's part in reading a zarr store: metadata, codecs, and layouts that only zarr understands.

Import this module in a worker thread, and only for a store that needs it: it imports zarr, which
costs a second and 60 MB. All of zarr's code runs in the worker threads of this module.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, cast

import numpy as np
import zarr.api.asynchronous as zarr_async
from zarr.abc.codec import Codec
from zarr.abc.store import ByteRequest, RangeByteRequest
from zarr.codecs import ShardingCodec
from zarr.core.array import AsyncArray
from zarr.core.array_spec import ArrayConfig
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.group import AsyncGroup
from zarr.storage import LocalStore

from flashd.errors import BundleCorruptError, DiskReadError, FlashdError
from flashd.store.zarr_bounded import bound_codecs
from flashd.store.zarr_chunks import MAX_DOCUMENT_BYTES, Runs, check_regular, most_stored_bytes
from flashd.store.zarr_layout import ZarrLayout, layout_of
from flashd.types import FFNGeometry, U8Array

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _StrictStore(LocalStore):
    """zarr takes a missing chunk for one full of zeros. Here a file that was there when the
    bundle was opened and is gone now is an error, not zero weights."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise BundleCorruptError(f"{root}: no such directory; convert the model again")
        super().__init__(root, read_only=True)
        self._most_bytes: dict[str, int] = {}
        self._at_open = frozenset(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        self._check_size(key, byte_range)
        value = await super().get(key, prototype, byte_range)
        if value is None and key in self._at_open:
            raise BundleCorruptError(f"{self.root / key}: disappeared while in use; convert the model again")
        return value

    def allow(self, prefix: str, most_bytes: int) -> None:
        """Let reads of keys below ``prefix`` have ``most_bytes``; others have what metadata may have."""
        self._most_bytes[prefix] = most_bytes

    def _check_size(self, key: str, byte_range: ByteRequest | None) -> None:
        """zarr reads what it is told to, however much, and waits for a FIFO for ever."""
        path = self.root / key
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        if not os.path.isdir(path):  # zarr takes it for a chunk that was left out
            check_regular(path, status)
        most_bytes = MAX_DOCUMENT_BYTES
        if not key.rpartition("/")[2].startswith((".z", "zarr.json")):
            most_bytes = self._most_bytes.get("/".join(key.split("/")[:2]), MAX_DOCUMENT_BYTES)
        nbytes = status.st_size
        if isinstance(byte_range, RangeByteRequest):
            nbytes = min(nbytes, byte_range.end) - byte_range.start
        elif byte_range is not None:
            nbytes = min(nbytes, getattr(byte_range, "suffix", nbytes))
        if nbytes > most_bytes:
            raise BundleCorruptError(
                f"{path}: {nbytes} bytes to read, expected at most {most_bytes}; convert the model again"
            )


class _InlineLoop(asyncio.SelectorEventLoop):
    """The event loop of a worker thread. zarr hands blocking work to threads; here it is in one already."""

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run ``func`` now."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as exc:
            done.set_exception(exc)
        return done


class ZarrThreads:
    """Worker threads that run zarr's coroutines, each thread in an event loop of its own: decoding
    a chunk takes milliseconds, and some of zarr's codecs do it where they are awaited.

    Args:
        threads: how many.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="flashd-zarr")
        self._mine = threading.local()
        self._loops: list[_InlineLoop] = []

    async def run(self, call: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts) -> T:
        """The result of ``await call(*args)`` in a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._drive, call, *args)

    def _drive(self, call: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts) -> T:
        loop: _InlineLoop | None = getattr(self._mine, "loop", None)
        if loop is None:
            loop = self._mine.loop = _InlineLoop()
            self._loops.append(loop)
        try:
            return loop.run_until_complete(call(*args))
        except BaseException:
            # Where one of several chunks fails, zarr leaves the others pending.
            rest = asyncio.all_tasks(loop)
            for task in rest:
                task.cancel()
            if rest:
                loop.run_until_complete(asyncio.wait(rest))
            raise

    def close(self) -> None:
        """Wait for what runs, then end the threads. Idempotent."""
        self._pool.shutdown()
        while self._loops:
            self._loops.pop().close()


class ZarrArray:
    """One layer's array as zarr sees it. Use its coroutines in ``ZarrThreads``.

    Attributes:
        where: the array's directory, for messages.
        layout: None where only zarr knows the chunks' places.
        chunk_rows: neurons that one chunk holds, or touches.
    """

    def __init__(self, where: Path, array: AsyncArray[Any]) -> None:
        self.where = where
        self.chunk_rows = int(array.chunks[0])
        prototype = default_buffer_prototype()
        documents = array.metadata.to_buffer_dict(prototype)
        document = documents["zarr.json" if array.metadata.zarr_format == 3 else ".zarray"]
        n_neurons, stride_bytes = array.shape
        self.layout: ZarrLayout | None = layout_of(json.loads(document.to_bytes()), (n_neurons, stride_bytes))
        bound_codecs(array)
        self._array = array
        self._prototype = prototype
        if self.layout is None:
            return
        self._pipeline = array.codec_pipeline
        if self.layout.sharded:
            sharding = cast(ShardingCodec, next(iter(cast(Iterable[Codec], self._pipeline))))
            self._pipeline = sharding.codec_pipeline
        config = ArrayConfig.from_dict({"order": array.order, "write_empty_chunks": False})
        spec = array.metadata.get_chunk_spec((0, 0), config, prototype)
        self._spec = replace(spec, shape=(self.layout.chunk_rows, stride_bytes))

    async def decode(self, chunk: int, stored: U8Array, runs: Runs, out: U8Array) -> None:
        """Decode a chunk and copy the wanted rows.

        Args:
            chunk: its number.
            stored: its bytes.
            runs: what goes where.
            out: the rows, as in ``WeightStore.read_rows``.

        Raises:
            BundleCorruptError: the bytes are no such chunk.
        """
        where = f"{self.where}: chunk {chunk}"
        buffer = self._prototype.buffer.from_array_like(stored)
        (decoded,) = await named(where, self._pipeline.decode([(buffer, self._spec)]))
        rows = None if decoded is None else decoded.as_numpy_array()
        if rows is None or rows.shape != self._spec.shape or rows.dtype != np.uint8:
            got = "nothing" if rows is None else f"{rows.dtype}{rows.shape}"
            raise BundleCorruptError(
                f"{where} is {got}, expected uint8{self._spec.shape}; convert the model again"
            )
        runs.copy(chunk * self._spec.shape[0], rows, out)

    async def read(self, start: int, stop: int, runs: Runs, out: U8Array) -> None:
        """Read neurons ``start..stop-1`` the way zarr does, and copy the wanted rows.

        Args:
            start: first neuron.
            stop: one past the last.
            runs: what goes where.
            out: the rows.

        Raises:
            BundleCorruptError, DiskReadError: as ``WeightStore.read_rows``.
        """
        value = await named(self.where, self._array.getitem((slice(start, stop), slice(None))))
        rows = cast(U8Array, np.asarray(value))
        runs.copy(start, rows, out)


async def open_arrays(root: Path, geometry: FFNGeometry) -> list[ZarrArray]:
    """Open the group and check every layer's array against ``geometry``; run it in ``ZarrThreads``.

    Raises:
        BundleCorruptError: no zarr group, or arrays of another shape or dtype.
    """
    expected = (geometry.n_neurons, geometry.stride_bytes)
    store = _StrictStore(root)
    group = cast(AsyncGroup, await named(root, zarr_async.open_group(store, mode="r")))
    arrays = []
    for layer in range(geometry.n_layers):
        where = root / f"layers/{layer}"
        array = await named(where, group.getitem(f"layers/{layer}"))
        if not isinstance(array, AsyncArray) or array.shape != expected or array.dtype != np.uint8:
            got = f"{array.dtype}{array.shape}" if isinstance(array, AsyncArray) else "a group"
            raise BundleCorruptError(
                f"{root}: layers/{layer} is {got}, expected uint8{expected}; convert the model again"
            )
        if min(file_shape := array.shards or array.chunks) < 1 or min(array.chunks) < 1:
            raise BundleCorruptError(
                f"{where}: chunks of {array.chunks} in files of {file_shape}, expected at least one row and "
                "one byte; convert the model again"
            )
        # Each chunk of a shard has 16 bytes in its index, and a codec's header.
        headers_bytes = 128 * (prod(file_shape) // prod(array.chunks))
        store.allow(f"layers/{layer}", most_stored_bytes(prod(file_shape)) + headers_bytes)
        arrays.append(ZarrArray(where, array))
    return arrays


async def named(where: Path | str, call: Awaitable[T]) -> T:
    """Translate what zarr raises on damaged data into one error that names the place."""
    try:
        return await call
    except FlashdError:
        raise
    except OSError as exc:
        if exc.errno == errno.EIO:
            raise DiskReadError(f"{where}: {exc.strerror}; check the device (dmesg)") from exc
        raise BundleCorruptError(f"{where}: {exc}; convert the model again") from exc
    except Exception as exc:  # zarr and its codecs raise many kinds
        reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
        raise BundleCorruptError(f"{where}: {reason}; convert the model again") from exc
