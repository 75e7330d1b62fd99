"""Reordering as a whole: run a text, compare orders on text they were not made from, write the best."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import flashd
from flashd.disk.curve import load_curve
from flashd.disk.engine import MAX_DESTINATIONS
from flashd.errors import CalibrationError, ConfigError
from flashd.layout.calibration import Calibration, to_json
from flashd.layout.manifest import BUNDLE, Manifest
from flashd.store.bundle_file import MAX_READ_BYTES
from flashd.store.open import open_manifest
from flashd.store.predictors import open_predictors
from flashd.tools.calibrate.dense import dense_model
from flashd.tools.calibrate.tokens import read_sequences
from flashd.tools.calibrated import has_predictors
from flashd.tools.convert.destination import ALREADY, Destination, made_already
from flashd.tools.reorder.orders import Cost, by_coactivation, by_frequency, cost, missing
from flashd.tools.reorder.rewrite import ORDER, rewrite, rewritten_bytes
from flashd.types import BoolArray, F32Array, I64Array, U8Array

KINDS = ("auto", "coactivation", "frequency")
# What a read costs beyond its bytes, as bytes, on a device that nobody has measured.
TYPICAL_READ_BYTES = 24 << 10
# Rows of a layer that are in RAM when orders are compared.
SHARE_IN_RAM = 0.5
# A layer of which more fires per token stays as it is: nearly all of it is read anyway.
MAX_FIRED = 0.5
# Part of the text that orders are compared on, and tokens at first that find the RAM empty.
_TEST_SHARE = 0.2
_WARM_UP_TOKENS = 128
# Memory for what fired.
_MAX_RECORD_BYTES = 256 << 20

# Told what is done, how much of it, of how much, in which unit.
Tell = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class ReorderReport:
    """What came of it.

    Attributes:
        directory: the new bundle; empty if there is none, because no order is better.
        order: that it has; ``original`` if no other was better.
        costs: of each order that was tried, and ``original``: reads per token, all layers; none, and zeros
            below, if an earlier run of the same command has made the bundle.
        gap_bytes: gaps up to it were read over, and a read counted as so many bytes.
        measured: whether that is this device's.
        tokens: that orders were made from.
        test_tokens: that they were compared on.
        layers: how many were put into another order.
    """

    directory: str
    order: str
    costs: dict[str, Cost]
    gap_bytes: int
    measured: bool
    tokens: int
    test_tokens: int
    layers: int


def reorder(
    directory: Path,
    dest: Path,
    texts: Sequence[Path],
    *,
    by: str = "auto",
    samples: int = 8192,
    overwrite: bool = False,
    tell: Tell = lambda what, done, total, unit: None,
    note: Callable[[str], None] = lambda text: None,
) -> ReorderReport:
    """Write a bundle whose neurons lie so that fewer reads bring them. Must not be called from inside an
    event loop.

    Args:
        directory: the bundle.
        dest: the one to make.
        texts: UTF-8 files of the kind of text that the model will see.
        by: ``frequency``, ``coactivation``, or ``auto``: the better one, if it is better than none.
        samples: tokens of text, at most.
        overwrite: whether a bundle at ``dest`` may be replaced.
        tell: called as things go on.
        note: called with one line about each thing that a person may not expect.

    Raises:
        BundleError, DiskReadError: no usable bundle.
        CalibrationError: a text that cannot be used, or a model whose neurons all fire.
        ConversionError, OutOfSpaceError: the new bundle cannot be written.
        ConfigError: an unknown order, or no samples.
    """
    if by not in KINDS:
        raise ConfigError(f"by is {by!r}, expected one of: {', '.join(KINDS)}")
    if samples < 1:
        raise ConfigError(f"samples is {samples}, expected 1 or more")
    manifest = open_manifest(directory)
    found = open_predictors(directory, manifest)
    calibration = None if found is None else found[0]
    layer_bytes = -(-manifest.ffn.n_neurons // 8) * manifest.ffn.n_layers
    samples = max(1, min(samples, _MAX_RECORD_BYTES // layer_bytes))
    sequences = read_sequences(directory, manifest, texts, samples, note).tokens
    fingerprint = _fingerprint(directory, manifest, calibration, sequences, by)

    def whole(made_in: Path, made: Manifest | None) -> bool:
        return made is not None and (calibration is None or has_predictors(made_in, made))

    if not overwrite:
        made = made_already(dest, fingerprint)
        if made is not None and whole(dest, made):
            note(f"{dest}: {ALREADY}")
            return _report_again(dest, made)
    with Destination(dest, fingerprint, overwrite, note) as out:
        if out.finished is not None and whole(out.root, out.finished):
            out.publish(out.finished)
            return _report_again(dest, out.finished)
        out.finished = None
        # Before the text is run: that may take hours.
        out.reserve(rewritten_bytes(manifest, calibration))
        fired = asyncio.run(record(directory, manifest, sequences, tell))
        chosen = choose(directory, manifest, fired, by, tell)
        if by == "auto" and chosen.order == "original":
            return chosen.report("")

        def progress(done: int) -> None:
            tell("write", done, manifest.ffn.n_layers, "layers")

        asyncio.run(rewrite(directory, manifest, out, chosen.orders, chosen.order, progress))
    return chosen.report(str(dest))


def _report_again(dest: Path, made: Manifest) -> ReorderReport:
    """Of what an earlier run has made; its measurements are gone."""
    return ReorderReport(str(dest), made.provenance[ORDER], {}, 0, False, 0, 0, 0)


class _Observer:
    """Keeps which neurons fire, as bits."""

    def __init__(self, manifest: Manifest) -> None:
        self._fired: list[list[U8Array]] = [[] for _ in range(manifest.ffn.n_layers)]
        self._n_neurons = manifest.ffn.n_neurons
        self._layer = 0
        self._block: BoolArray = np.empty((0, 0), np.bool_)

    def layer(self, layer: int, x: F32Array) -> None:
        """See ``Observer.layer``."""
        self._layer = layer
        self._block = np.empty((len(x), self._n_neurons), np.bool_)

    def hidden(self, start: int, values: F32Array) -> None:
        """See ``Observer.hidden``."""
        stop = start + values.shape[1]
        np.not_equal(values, 0, out=self._block[:, start:stop])
        if stop == self._n_neurons:
            self._fired[self._layer].append(np.packbits(self._block, axis=1))

    def fired(self) -> list[U8Array]:
        """Per layer, ``[tokens, ceil(n_neurons / 8)]``."""
        return [np.concatenate(blocks) for blocks in self._fired]


async def record(
    directory: Path, manifest: Manifest, sequences: Sequence[I64Array], tell: Tell
) -> list[U8Array]:
    """Run sequences of tokens; per layer, which neurons fire, ``[tokens, ceil(n_neurons / 8)]`` bits."""
    observer, done, total = _Observer(manifest), 0, sum(map(len, sequences))
    async with dense_model(directory, manifest.thresholds) as model:
        model.observer = observer
        for tokens in sequences:
            tell("record", done, total, "tokens")
            await model.run(tokens, likelihood=False)
            done += len(tokens)
    tell("record", total, total, "tokens")
    return observer.fired()


@dataclass(frozen=True)
class Chosen:
    """Orders for all layers, and how they compare."""

    order: str
    orders: list[I64Array]
    costs: dict[str, Cost]
    gap_bytes: int
    measured: bool
    tokens: int
    test_tokens: int
    layers: int

    def report(self, directory: str) -> ReorderReport:
        """For people."""
        facts = (self.gap_bytes, self.measured, self.tokens, self.test_tokens)
        return ReorderReport(directory, self.order, self.costs, *facts, self.layers if directory else 0)


def choose(directory: Path, manifest: Manifest, fired: Sequence[U8Array], by: str, tell: Tell) -> Chosen:
    """Make orders from the first part of what was recorded, compare them on the rest.

    Raises:
        CalibrationError: too little text, or nothing that ever stays silent.
    """
    geometry, n_tokens = manifest.ffn, len(fired[0])
    n_test = int(n_tokens * _TEST_SHARE)
    train = n_tokens - n_test
    if n_test <= _WARM_UP_TOKENS:
        raise CalibrationError(f"the texts give {n_tokens} tokens, too few to compare orders; give more text")
    gap_bytes, measured = _read_bytes(directory, manifest)
    stride = geometry.stride_bytes
    limits = (stride, gap_bytes // stride, min(MAX_DESTINATIONS, max(1, MAX_READ_BYTES // stride)))
    same = np.arange(geometry.n_neurons)
    makers = {"frequency": by_frequency, "coactivation": by_coactivation}
    names = list(makers) if by == "auto" else [by]
    orders: dict[str, list[I64Array]] = {name: [] for name in ("original", *names)}
    costs = dict.fromkeys(orders, Cost(0, 0, 0))
    changed = 0
    for layer, bits in enumerate(fired):
        tell("order", layer, geometry.n_layers, "layers")
        share = np.unpackbits(bits[:train], axis=1, count=geometry.n_neurons).mean()
        missed = missing(bits[train:], geometry.n_neurons, int(SHARE_IN_RAM * geometry.n_neurons))
        changed += bool(share <= MAX_FIRED)
        for name in orders:
            keep = name == "original" or share > MAX_FIRED
            order = same if keep else makers[name](bits[:train], geometry.n_neurons)
            orders[name].append(order)
            costs[name] += cost(missed[_WARM_UP_TOKENS:], order, *limits)
    tell("order", geometry.n_layers, geometry.n_layers, "layers")
    if not changed:
        raise CalibrationError(
            f"{directory}: more than {MAX_FIRED:.0%} of every layer's neurons fire at every token, so all "
            "orders are alike; a model without ReLU has to be made sparse first (flashd calibrate --sparsify)"
        )
    best = min(costs, key=lambda name: costs[name].weighed_bytes(gap_bytes)) if by == "auto" else by
    return Chosen(best, orders[best], costs, gap_bytes, measured, train, n_test, changed)


def _read_bytes(directory: Path, manifest: Manifest) -> tuple[int, bool]:
    """What a read costs beyond its bytes, as bytes, and whether that was measured on this device."""
    curve = load_curve(directory / BUNDLE) if manifest.store == "file" else None
    return (curve.break_even_bytes() if curve else TYPICAL_READ_BYTES), curve is not None


def _fingerprint(
    directory: Path,
    manifest: Manifest,
    calibration: Calibration | None,
    sequences: Sequence[I64Array],
    by: str,
) -> str:
    """Of everything that the new bundle depends on."""
    facts = {
        "flashd": flashd.__version__,
        "bundle": [entry.sha256 for entry in manifest.files],
        "thresholds": manifest.thresholds,
        "calibration": None if calibration is None else to_json(calibration),
        "by": by,
        "read_bytes": _read_bytes(directory, manifest)[0],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for tokens in sequences:
        digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
    return digest.hexdigest()
