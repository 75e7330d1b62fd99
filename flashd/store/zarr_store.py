"""Store ``zarr``: the same rows as a zarr group, one uint8 array ``layers/{i}`` per layer of
shape ``[n_neurons, stride_bytes]``, in whatever chunks, shards and codecs zarr-python reads.

Import this module only when a zarr bundle is opened: it imports zarr.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import zarr.api.asynchronous as zarr_async
from zarr.abc.store import ByteRequest
from zarr.core.array import AsyncArray
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.core.group import AsyncGroup
from zarr.storage import LocalStore

from flashd.errors import BundleCorruptError, DiskReadError, FlashdError
from flashd.store.base import WeightStore
from flashd.types import FFNGeometry, I64Array, U8Array

T = TypeVar("T")
# Chunks decoded at once by read_rows; bounds its memory.
_CHUNKS_AT_ONCE = 8


class _StrictStore(LocalStore):
    """zarr takes a missing chunk for one full of zeros. Here a file that was there when the
    bundle was opened and is gone now is an error, not zero weights."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise BundleCorruptError(f"{root}: no such directory; convert the model again")
        super().__init__(root, read_only=True)
        self._at_open = frozenset(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        value = await super().get(key, prototype, byte_range)
        if value is None and key in self._at_open:
            raise BundleCorruptError(f"{self.root / key}: disappeared while in use; convert the model again")
        return value


class ZarrStore(WeightStore):
    """Neuron rows of a zarr group; open it with ``await ZarrStore.open(path, geometry)``."""

    name = "zarr"
    alignment_bytes = 1

    def __init__(self, root: Path, geometry: FFNGeometry, arrays: list[AsyncArray[Any]]) -> None:
        self.geometry = geometry
        self._root = root
        self._arrays = arrays
        self._in_flight: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    async def open(cls, root: Path, geometry: FFNGeometry) -> ZarrStore:
        """Open the group and check every layer's array against ``geometry``.

        Raises:
            BundleCorruptError: no zarr group, or arrays of another shape or dtype.
        """
        expected = (geometry.n_neurons, geometry.stride_bytes)
        group = cast(AsyncGroup, await _named(root, zarr_async.open_group(_StrictStore(root), mode="r")))
        arrays = []
        for layer in range(geometry.n_layers):
            array = await _named(root / f"layers/{layer}", group.getitem(f"layers/{layer}"))
            if not isinstance(array, AsyncArray) or array.shape != expected or array.dtype != np.uint8:
                got = f"{array.dtype}{array.shape}" if isinstance(array, AsyncArray) else "a group"
                raise BundleCorruptError(
                    f"{root}: layers/{layer} is {got}, expected uint8{expected}; convert the model again"
                )
            arrays.append(array)
        return cls(root, geometry, arrays)

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        """See ``WeightStore.read_range``."""
        self.check_request(layer, start, stop - 1, stop - start, out)
        if start < stop:
            await self._guarded(self._copy(layer, start, stop, out))

    async def read_rows(self, layer: int, ids: I64Array, out: U8Array) -> None:
        """See ``WeightStore.read_rows``. A chunk is decoded once per call, however many of its
        neurons are wanted."""
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
        self.check_request(layer, low, high, len(ids), out)
        if len(ids):
            await self._guarded(self._gather(layer, ids, out))

    async def _copy(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        out[:] = await self._get(layer, start, stop)

    async def _gather(self, layer: int, ids: I64Array, out: U8Array) -> None:
        rows = self._arrays[layer].chunks[0]
        order = np.argsort(ids, kind="stable")
        chunk = ids[order] // rows
        bounds = np.flatnonzero(np.diff(chunk, prepend=-1, append=-1)).tolist()
        groups = [order[a:b] for a, b in pairwise(bounds)]

        async def scatter(where: I64Array) -> None:
            start = int(ids[where[0]]) // rows * rows
            stop = min(start + rows, self.geometry.n_neurons)
            out[where] = (await self._get(layer, start, stop))[ids[where] - start]

        for first in range(0, len(groups), _CHUNKS_AT_ONCE):
            some = [scatter(where) for where in groups[first : first + _CHUNKS_AT_ONCE]]
            # All of them end before the first failure is raised: nothing writes to out later.
            for result in await asyncio.gather(*some, return_exceptions=True):
                if result is not None:
                    raise result

    async def _get(self, layer: int, start: int, stop: int) -> U8Array:
        where = self._root / f"layers/{layer}"
        value = await _named(where, self._arrays[layer].getitem((slice(start, stop), slice(None))))
        return cast(U8Array, np.asarray(value))

    async def _guarded(self, read: Coroutine[Any, Any, None]) -> None:
        """Run a read as a task of its own, so that ``close`` can wait for cancelled ones too."""
        if self._closed:
            read.close()
            raise ValueError("the zarr store is closed")
        task = asyncio.create_task(read)
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        await asyncio.shield(task)

    async def close(self) -> None:
        """See ``WeightStore.close``."""
        self._closed = True
        while self._in_flight:
            await asyncio.wait(set(self._in_flight))


async def _named(where: Path, call: Awaitable[T]) -> T:
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
