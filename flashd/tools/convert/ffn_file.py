"""``ffn.bundle`` and ``ffn.sums``: all layers in one file, one CRC32C per row in the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from flashd import kernels
from flashd.layout.geometry import LAYER_ALIGN_BYTES, round_up
from flashd.layout.manifest import BUNDLE, SUMS, FileEntry
from flashd.tools.convert.files import HashedFile
from flashd.types import FFNGeometry, U8Array

_BLOCK_BYTES = 8 << 20
SUM_BYTES = 4


def row_sums(rows: U8Array) -> bytes:
    """CRC32C of each row over the full stride, as ``ffn.sums`` has them."""
    sums = np.empty(len(rows), np.uint32)
    kernels.crc32c(rows, sums)
    return sums.astype("<u4", copy=False).tobytes()


def open_sums(root: Path, geometry: FFNGeometry, layers: int) -> HashedFile:
    """``ffn.sums`` with ``layers`` complete layers in it."""
    return HashedFile(root / SUMS, layers * geometry.n_neurons * SUM_BYTES)


class BundleFileWriter:
    """Writes ``ffn.bundle``, resuming behind ``layers`` complete layers. See ``FFNWriter``.

    Args:
        root: the bundle's directory.
        geometry: the rows.
        layers: complete layers from an earlier run.
        on_rehash: called with the size of each block of them that is read again.
    """

    def __init__(
        self, root: Path, geometry: FFNGeometry, layers: int, on_rehash: Callable[[int], None]
    ) -> None:
        self.block_rows = max(1, _BLOCK_BYTES // geometry.stride_bytes)
        self._root = root
        self._geometry = geometry
        self._layer_bytes = round_up(geometry.layer_bytes, LAYER_ALIGN_BYTES)
        self._sums = open_sums(root, geometry, layers)
        try:
            self._bundle = HashedFile(
                root / BUNDLE, layers * self._layer_bytes, lambda block: on_rehash(len(block))
            )
        except BaseException:
            self._sums.close()
            raise

    def write(self, layer: int, start: int, rows: U8Array) -> None:
        """See ``FFNWriter.write``."""
        assert self._bundle.size_bytes == layer * self._layer_bytes + start * self._geometry.stride_bytes
        self._bundle.write(rows)
        self._sums.write(row_sums(rows))

    def end_layer(self, layer: int) -> None:
        """Pad, so that the next layer starts aligned and aligned reads of the last end inside."""
        self._bundle.write(bytes((layer + 1) * self._layer_bytes - self._bundle.size_bytes))

    def sync(self) -> None:
        """See ``FFNWriter.sync``."""
        self._bundle.sync()
        self._sums.sync()

    def sizes(self) -> dict[str, int]:
        """See ``FFNWriter.sizes``."""
        return {BUNDLE: self._bundle.size_bytes, SUMS: self._sums.size_bytes}

    def zarr_files(self) -> list[tuple[str, int, str]]:
        """Nothing to remember: the prefix of one file is read again on resume."""
        return []

    def entries(self) -> list[FileEntry]:
        """See ``FFNWriter.entries``."""
        return [self._bundle.entry(self._root), self._sums.entry(self._root)]

    def close(self) -> None:
        """See ``FFNWriter.close``."""
        self._bundle.close()
        self._sums.close()
