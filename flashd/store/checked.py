"""A wrapper that compares rows with their checksums the first time they are read.

What was damaged on disk before the daemon started is found at first use, before a kernel sees it;
later reads cost nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flashd import kernels
from flashd.errors import BundleCorruptError
from flashd.layout.manifest import BUNDLE, ZARR
from flashd.store.base import WeightStore
from flashd.types import I64Array, U8Array, U32Array


class CheckedStore(WeightStore):
    """Checks every row once; a mismatch is read again once, then it is an error.

    Args:
        inner: the store that does the work; closed with this one.
        sums: CRC32C of every row, ``[n_layers, n_neurons]``.
        directory: the bundle, for messages.
    """

    def __init__(self, inner: WeightStore, sums: U32Array, directory: Path) -> None:
        self.inner = inner
        self.name = inner.name
        self.geometry = inner.geometry
        self.alignment_bytes = inner.alignment_bytes
        self._sums = sums
        self._file = directory / (ZARR if inner.name.startswith("zarr") else BUNDLE)
        self._checked = np.zeros(sums.shape, np.bool_)

    async def read_range(self, layer: int, start: int, stop: int, out: U8Array) -> None:
        """See ``WeightStore.read_range``.

        Raises:
            BundleCorruptError: also when a row isn't what was written.
        """
        await self.inner.read_range(layer, start, stop, out)
        if not self._checked[layer, start:stop].all() and self._bad(layer, np.arange(start, stop), out).size:
            await self.inner.read_range(layer, start, stop, out)
            self._accept(layer, np.arange(start, stop), out)

    async def read_rows(self, layer: int, ids: I64Array, out: U8Array) -> None:
        """See ``WeightStore.read_rows``.

        Raises:
            BundleCorruptError: also when a row isn't what was written.
        """
        await self.inner.read_rows(layer, ids, out)
        if not self._checked[layer, ids].all() and self._bad(layer, ids, out).size:
            await self.inner.read_rows(layer, ids, out)
            self._accept(layer, ids, out)

    def _accept(self, layer: int, ids: I64Array, out: U8Array) -> None:
        bad = self._bad(layer, ids, out)
        if bad.size:
            raise BundleCorruptError(
                f"{self._file}: layer {layer}, neuron {bad[0]}: checksum mismatch ({bad.size} of "
                f"{len(ids)} rows); see `flashd verify`, then copy the bundle again or convert again"
            )

    def _bad(self, layer: int, ids: I64Array, out: U8Array) -> I64Array:
        """Neurons whose bytes differ from their checksum; the others count as checked."""
        got = np.empty(len(ids), np.uint32)
        kernels.crc32c(out, got)
        good = got == self._sums[layer, ids]
        self._checked[layer, ids[good]] = True
        bad: I64Array = ids[~good]
        return bad

    async def close(self) -> None:
        """See ``WeightStore.close``."""
        await self.inner.close()
