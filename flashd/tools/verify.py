"""``flashd verify``: every checksum of a bundle, near disk speed, in a few megabytes."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flashd import kernels
from flashd.disk.buffers import aligned_empty
from flashd.disk.engine import ReadBatch, ReadEngine
from flashd.disk.probe import open_engine
from flashd.errors import BundleCorruptError, BundleError, DiskReadError
from flashd.layout.geometry import LAYER_ALIGN_BYTES
from flashd.layout.manifest import BUNDLE, MANIFEST, SUMS, ZARR, FileEntry, Manifest
from flashd.store.base import WeightStore
from flashd.store.open import load_sums, open_predictors, read_manifest, size_problem
from flashd.store.zarr_store import ZarrStore
from flashd.tools.calibrated import CALIBRATION_FILES
from flashd.types import U8Array, U32Array

ProgressCall = Callable[[str, int, int], object]

_CHUNK_BYTES = 4 << 20
_BUFFERS = 3  # one is hashed while two are read
_REMEDY = "copy the bundle again or convert the model again"


@dataclass(frozen=True)
class BadRow:
    """A neuron row whose bytes are not those that were written.

    ``offset_bytes`` is the row's place in ``file``, or in the layer's zarr array.
    """

    file: str
    layer: int
    neuron: int
    offset_bytes: int
    expected_crc32c: int
    got_crc32c: int


@dataclass
class VerifyReport:
    """What ``verify`` found.

    Attributes:
        directory: the bundle.
        checked_bytes: bytes read and hashed.
        checked_rows: neuron rows whose CRC32C was compared.
        bad_rows: how many of them differ.
        first_bad_row: the first of those.
        unlisted: files that are there but not in the manifest; no damage by itself.
        problems: one line for each thing that is wrong; empty for a sound bundle.
        seconds: how long it took.
    """

    directory: str
    checked_bytes: int = 0
    checked_rows: int = 0
    bad_rows: int = 0
    first_bad_row: BadRow | None = None
    unlisted: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the bundle is sound."""
        return not self.problems


def verify(directory: Path, progress: ProgressCall | None = None) -> VerifyReport:
    """Check sizes, SHA-256 of every listed file and CRC32C of every neuron row.

    Must not be called from inside an event loop.

    Args:
        directory: the bundle.
        progress: called with phase, bytes done and bytes in all.

    Raises:
        BundleError: the directory has no usable manifest; all other damage is in the report.
    """
    return asyncio.run(_Verifier(directory, read_manifest(directory), progress).run())


class _Verifier:
    def __init__(self, directory: Path, manifest: Manifest, progress: ProgressCall | None) -> None:
        self._directory = directory
        self._manifest = manifest
        self._progress = progress
        self._sums: U32Array | None = None
        self._report = VerifyReport(str(directory))
        self._done_bytes = 0
        self._total_bytes = sum(entry.size_bytes for entry in manifest.files)
        if manifest.store == "zarr":  # read a second time, through zarr, for the rows
            self._total_bytes += manifest.ffn.n_layers * manifest.ffn.layer_bytes

    async def run(self) -> VerifyReport:
        began_s = time.perf_counter()
        manifest, report = self._manifest, self._report
        report.unlisted = _unlisted(self._directory, manifest)
        problems = {entry.name: size_problem(self._directory, entry) for entry in manifest.files}
        report.problems += [f"{problem}; {_REMEDY}" for problem in problems.values() if problem]
        self._sums = self._load_sums(problems.get(SUMS))
        for entry in manifest.files:
            if problems[entry.name]:
                self._advance(entry.size_bytes)
            else:
                await self._check_file(entry)
        if manifest.store == "zarr" and not any(
            problem for name, problem in problems.items() if name.startswith(ZARR + "/")
        ):
            await self._check_zarr_rows()
        self._describe_bad_rows()
        await asyncio.to_thread(self._check_predictors)
        report.seconds = time.perf_counter() - began_s
        return report

    def _load_sums(self, size_is_wrong: str | None) -> U32Array | None:
        if size_is_wrong:
            return None
        try:
            self._manifest.file(SUMS)
            return load_sums(self._directory, self._manifest, check=False)
        except (BundleError, DiskReadError) as exc:
            self._report.problems.append(f"neuron rows cannot be checked: {exc}")
            return None

    def _check_predictors(self) -> None:
        """What calibration added: it has hashes of its own."""
        try:
            opened = open_predictors(self._directory, self._manifest)
        except (BundleError, DiskReadError) as exc:
            self._report.problems.append(str(exc))
            return
        if opened is not None:
            self._report.checked_bytes += opened[0].predictors_bytes

    async def _check_file(self, entry: FileEntry) -> None:
        """SHA-256 of one file, and on the way the rows of ``ffn.bundle``."""
        path = self._directory / entry.name
        digest = hashlib.sha256()
        is_bundle = self._manifest.store == "file" and entry.name == BUNDLE
        cuts = _bundle_cuts(self._manifest) if is_bundle else _cuts(entry.size_bytes)
        try:
            engine = await open_engine(path)
            try:
                async with aclosing(_read_ahead(engine, [cut.range_bytes for cut in cuts])) as chunks:
                    rest = iter(cuts)
                    async for chunk in chunks:
                        await self._hash(digest, chunk, next(rest))
            finally:
                await engine.close()
        except (BundleCorruptError, DiskReadError) as exc:
            self._report.problems.append(str(exc))
            return
        if digest.hexdigest() != entry.sha256:
            self._report.problems.append(
                f"{path}: SHA-256 is {digest.hexdigest()}, expected {entry.sha256}; {_REMEDY}"
            )

    async def _hash(self, digest: hashlib._Hash, chunk: U8Array, cut: _Cut) -> None:
        """Both sums of a chunk at the same time; both release the GIL."""
        sha = asyncio.to_thread(digest.update, chunk.data)
        if cut.layer is None:
            await sha
        else:
            stride = self._manifest.ffn.stride_bytes
            rows = chunk[: (cut.stop - cut.start) * stride].reshape(-1, stride)
            crc = asyncio.to_thread(self._check_rows, BUNDLE, cut.layer, cut.start, cut.offset_bytes, rows)
            await asyncio.gather(sha, crc)
        self._report.checked_bytes += len(chunk)
        self._advance(len(chunk))

    def _check_rows(self, file: str, layer: int, start: int, offset_bytes: int, rows: U8Array) -> None:
        """Compare the CRC32C of ``rows``, neurons ``start`` on, which lie at ``offset_bytes``."""
        if self._sums is None:
            return
        got = np.empty(len(rows), np.uint32)
        kernels.crc32c(rows, got)
        expected = self._sums[layer, start : start + len(rows)]
        bad = np.flatnonzero(got != expected)
        report = self._report
        report.checked_rows += len(rows)
        report.bad_rows += len(bad)
        if len(bad) and report.first_bad_row is None:
            row = int(bad[0])
            report.first_bad_row = BadRow(
                file,
                layer,
                start + row,
                offset_bytes + row * rows.shape[1],
                int(expected[row]),
                int(got[row]),
            )

    async def _check_zarr_rows(self) -> None:
        if self._sums is None:
            return
        try:
            # Damage in one layer shall not hide the others.
            store = await ZarrStore.open(self._directory / ZARR, self._manifest.ffn, keep_damaged=True)
        except (BundleError, DiskReadError) as exc:
            self._report.problems.append(str(exc))
            return
        try:
            for layer in range(self._manifest.ffn.n_layers):
                await self._check_zarr_layer(store, layer)
        finally:
            await store.close()

    async def _check_zarr_layer(self, store: WeightStore, layer: int) -> None:
        geometry = self._manifest.ffn
        step = max(1, _CHUNK_BYTES // geometry.stride_bytes)
        rows = aligned_empty(step * geometry.stride_bytes).reshape(step, -1)
        for start in range(0, geometry.n_neurons, step):
            stop = min(start + step, geometry.n_neurons)
            part = rows[: stop - start]
            try:
                await store.read_range(layer, start, stop, part)
            except (BundleCorruptError, DiskReadError) as exc:
                self._report.problems.append(f"{exc}, neurons {start} to {stop - 1}")
                self._advance((geometry.n_neurons - start) * geometry.stride_bytes)
                return  # one line a layer says enough
            where = (f"{ZARR}/layers/{layer}", layer, start, start * geometry.stride_bytes)
            await asyncio.to_thread(self._check_rows, *where, part)
            self._advance(part.nbytes)

    def _describe_bad_rows(self) -> None:
        report = self._report
        row = report.first_bad_row
        if row is not None:
            report.problems.append(
                f"{self._directory / row.file}: {report.bad_rows} of {report.checked_rows} neuron rows are "
                f"damaged, first layer {row.layer}, neuron {row.neuron}, at offset {row.offset_bytes}: "
                f"CRC32C {row.got_crc32c:08x}, expected {row.expected_crc32c:08x}; {_REMEDY}"
            )

    def _advance(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self._progress is not None:
            self._progress("verify", self._done_bytes, self._total_bytes)


@dataclass(frozen=True)
class _Cut:
    """A piece of a file; if ``layer`` is not None it begins with neurons ``start..stop-1``."""

    offset_bytes: int
    nbytes: int
    layer: int | None = None
    start: int = 0
    stop: int = 0

    @property
    def range_bytes(self) -> tuple[int, int]:
        return self.offset_bytes, self.nbytes


def _cuts(size_bytes: int) -> list[_Cut]:
    return [
        _Cut(offset, min(_CHUNK_BYTES, size_bytes - offset)) for offset in range(0, size_bytes, _CHUNK_BYTES)
    ]


def _bundle_cuts(manifest: Manifest) -> list[_Cut]:
    """Pieces of ``ffn.bundle`` at row borders; a layer's last one takes its padding along."""
    geometry = manifest.ffn
    stride = geometry.stride_bytes
    step = max(1, _CHUNK_BYTES // stride)
    padding = -geometry.layer_bytes % LAYER_ALIGN_BYTES
    cuts = []
    for layer, layer_offset in enumerate(manifest.layer_offset_bytes):
        for start in range(0, geometry.n_neurons, step):
            stop = min(start + step, geometry.n_neurons)
            nbytes = (stop - start) * stride + (padding if stop == geometry.n_neurons else 0)
            cuts.append(_Cut(layer_offset + start * stride, nbytes, layer, start, stop))
    return cuts


async def _read_ahead(engine: ReadEngine, ranges: Sequence[tuple[int, int]]) -> AsyncGenerator[U8Array, None]:
    """Pieces of a file in order, each valid until the next is asked for."""
    size = max((nbytes for _, nbytes in ranges), default=0)
    buffers = [aligned_empty(size, max(4096, engine.alignment_bytes)) for _ in range(_BUFFERS)]
    reads: deque[tuple[asyncio.Task[None], U8Array]] = deque()
    started = 0
    try:
        for i in range(len(ranges)):
            while started < min(i + _BUFFERS, len(ranges)):
                offset, nbytes = ranges[started]
                view = buffers[started % _BUFFERS][:nbytes]
                batch = ReadBatch(np.array([offset]), np.array([nbytes]), view, np.array([0]))
                reads.append((asyncio.create_task(engine.read(batch)), view))
                started += 1
            read, view = reads.popleft()
            await read
            yield view
    finally:
        await asyncio.gather(*(read for read, _ in reads), return_exceptions=True)


def _unlisted(directory: Path, manifest: Manifest) -> list[str]:
    listed = {MANIFEST, *(entry.name for entry in manifest.files)}
    present = (path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    strange = (name for name in present if name not in listed)
    return sorted(name for name in strange if name.split("/")[0] not in CALIBRATION_FILES)
