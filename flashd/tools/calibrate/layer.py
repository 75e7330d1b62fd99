"""One layer: which predictor it gets, or none; and its look ahead at the next layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from flashd.config import MAX_BATCH
from flashd.layout.calibration import PARTS
from flashd.predictor.lowrank import LowRank
from flashd.tools.calibrate import train
from flashd.tools.calibrate.measure import Quality, bits, frequency, quality, threshold_for, usage
from flashd.tools.calibrate.options import CalibrateOptions
from flashd.tools.calibrate.scratch import Scratch
from flashd.tools.calibrate.tokens import Sequences
from flashd.types import F32Array, FFNGeometry, U8Array, WeightArray

LATE_LAYERS = 4
# The paper's ranks are d/32 and d/4; d/2 is for models so small that their layers are hardly of low rank.
_RANK_DIVISORS = (32, 16, 8, 4, 2)
_TRIAL_STEPS = 400
# Whole trainings brought false positives down to 20 to 60 % of what a trial reached.
_HOPELESS = 5
_SCORE_TOKENS = 256
_F1_POINTS = 2048
# How a look ahead's rank is chosen where the next layer's predictor has none (``gate``).
_LOOKAHEAD_DIVISOR = 16


@dataclass(frozen=True)
class Job:
    """What the work on every layer shares."""

    scratch: Scratch
    geometry: FFNGeometry
    sequences: Sequences
    options: CalibrateOptions
    step: Callable[[], None] = lambda: None  # called often; what it raises ends the work

    def kept(self, name: str) -> tuple[dict[str, Any], dict[str, WeightArray]]:
        """A result of this job."""
        result = self.scratch.load(name)
        assert result is not None
        return result

    def records(self, layer: int) -> Any:
        """All records of a layer."""
        return self.scratch.records(layer, self.sequences.total)

    def ranks(self, layer: int) -> list[int]:
        """Ranks to try, ascending."""
        options, d = self.options, self.geometry.d_model
        if options.late_rank and layer >= self.geometry.n_layers - LATE_LAYERS:
            return [options.late_rank]
        if options.rank:
            return [options.rank]
        return sorted({max(1, d // divisor) for divisor in _RANK_DIVISORS})


def predictor(job: Job, layer: int) -> None:
    """Train and measure a layer's predictor; kept in the scratch directory, and done once."""
    name = f"predictor-{layer:03}"
    if job.scratch.load(name) is not None:
        return
    n, options = job.geometry.n_neurons, job.options
    records = job.records(layer)
    fired = records["mask"]
    facts: dict[str, Any] = {"masked": True, "threshold": 0.0, "rank": 0, "curve": []}
    arrays: dict[str, WeightArray] = {}
    requested: U8Array | None = None
    share = float(frequency(fired, n).mean())
    if options.predictor == "gate":
        requested = np.ascontiguousarray(fired)
    elif share * (1 - options.fn_target) <= options.max_requested:
        chosen, facts["curve"] = _search(job, layer, records)
        facts |= {"threshold": chosen.threshold, "rank": len(chosen.w1)}
        arrays = {part: getattr(chosen, part) for part in PARTS}
        requested = _requested(chosen, records["x"], n)
    test = job.sequences.rows("test")
    found = Quality(0.0, 1.0, 1.0, share) if requested is None else quality(requested[test], fired[test], n)
    if requested is None or found.requested > options.max_requested:
        # Too dense: reading it whole, in one stretch, is faster than picking most of its rows.
        facts |= {"masked": False, "threshold": 0.0, "rank": 0}
        arrays, requested = {}, None
    facts |= {"would_request": found.requested, "fired": found.fired}
    if requested is not None:
        facts |= {
            "false_negative": found.false_negative,
            "false_positive": found.false_positive,
            "requested": found.requested,
        }
        wanted = usage(_held_out(job, requested), n)
        facts |= {"s_agg_requested": wanted.s_agg, "capacity_rows": wanted.capacity_rows}
        arrays["requested"] = requested
    facts["s_agg_fired"] = usage(_held_out(job, fired), n).s_agg
    arrays["frequency"] = frequency(fired if requested is None else requested, n)
    job.scratch.save(name, facts, arrays)


def _held_out(job: Job, mask: Any) -> list[Any]:
    """Masks of validation and test text, sequence by sequence."""
    at = job.sequences.rows("validation").start
    pieces = []
    for tokens in (*job.sequences.part("validation"), *job.sequences.part("test")):
        pieces.append(mask[at : at + len(tokens)])
        at += len(tokens)
    return pieces


def _search(job: Job, layer: int, records: Any) -> tuple[LowRank, list[dict[str, float]]]:
    """The smallest predictor that is good enough, else the best; and what all of them reach."""
    options, n = job.options, job.geometry.n_neurons
    train_on, held = records[job.sequences.rows("train")], records[job.sequences.rows("validation")]
    ranks = job.ranks(layer)

    def trained(rank: int, on: Any, epochs: int) -> tuple[LowRank, Quality]:
        seed = options.seed + 1009 * layer + rank
        weights = train.train(on["x"], on["mask"], n, rank, epochs=epochs, seed=seed, step=job.step)
        chosen = _with_threshold(weights, held["x"], held["mask"], n, options.fn_target)
        return chosen, quality(_requested(chosen, held["x"], n), held["mask"], n)

    found: dict[int, tuple[LowRank, Quality]] = {}
    whole: set[int] = set()
    low, high = 0, len(ranks) - 1
    while low <= high:
        middle = (low + high) // 2
        rank = ranks[middle]
        # A short training tells whether a whole one can be enough; the largest rank gets it anyhow.
        stride = len(train_on) // (_TRIAL_STEPS * train.BATCH_TOKENS)
        if stride >= 2 and middle < len(ranks) - 1:
            found[rank] = trained(rank, train_on[::stride], 1)
        if rank not in found or found[rank][1].false_positive <= _HOPELESS * options.fp_target:
            found[rank] = trained(rank, train_on, options.epochs)
            whole.add(rank)
        if found[rank][1].false_positive <= options.fp_target:
            high = middle - 1
        else:
            low = middle + 1
    errors = {rank: each.false_positive for rank, (_, each) in found.items()}
    enough = [rank for rank, error in errors.items() if error <= options.fp_target]
    chosen = min(enough) if enough else min(whole, key=lambda rank: errors[rank])
    points = [
        {"rank": rank, "trial": float(rank not in whole), **asdict(found[rank][1])} for rank in sorted(found)
    ]
    return found[chosen][0], points


def _with_threshold(weights: train.Weights, x: Any, fired: Any, n: int, fn_target: float) -> LowRank:
    """Choose the threshold on validation text."""
    of_fired, highest = [], -np.inf
    for at in range(0, len(x), _SCORE_TOKENS):
        scores = train.scores(weights, x[at : at + _SCORE_TOKENS])
        of_fired.append(scores[bits(fired[at : at + _SCORE_TOKENS], n)])
        highest = max(highest, float(scores.max()))
    threshold = threshold_for(np.concatenate(of_fired), fn_target, highest)
    return LowRank(weights.w1, weights.b1, weights.w2, weights.b2, threshold)


def _requested(trained: LowRank, x: Any, n: int) -> U8Array:
    """Masks as the daemon will get them, as packed bits."""
    packed = np.empty((len(x), -(-n // 8)), np.uint8)
    for at in range(0, len(x), MAX_BATCH):
        inputs = np.ascontiguousarray(x[at : at + MAX_BATCH], np.float32)
        ids, used = trained(inputs)
        mask = np.zeros((len(inputs), n), np.bool_)
        mask[:, ids] = used
        packed[at : at + MAX_BATCH] = np.packbits(mask, axis=1)
    return packed


def lookahead(job: Job, layer: int) -> None:
    """Train a layer's guess at what the next one requests, if that has a mask; kept likewise.

    The next layer's predictor must be there.
    """
    name = f"lookahead-{layer:03}"
    if job.scratch.load(name) is not None:
        return
    facts, arrays = job.kept(f"predictor-{layer + 1:03}")
    if not facts["masked"]:
        job.scratch.save(name, {}, {})
        return
    n, options = job.geometry.n_neurons, job.options
    wanted, x = arrays["requested"], job.records(layer)["x"]
    rank = facts["rank"] or max(1, job.geometry.d_model // _LOOKAHEAD_DIVISOR)
    rows, held = job.sequences.rows("train"), job.sequences.rows("validation")
    seed = options.seed + 1009 * layer + 500_009
    weights = train.train(x[rows], wanted[rows], n, rank, epochs=options.epochs, seed=seed, step=job.step)
    threshold = _best_f1(weights, x[held], wanted[held], n)
    trained = LowRank(weights.w1, weights.b1, weights.w2, weights.b2, threshold)
    test = job.sequences.rows("test")
    found = quality(_requested(trained, x[test], n), wanted[test], n)
    job.scratch.save(
        name,
        {
            "threshold": threshold,
            "rank": rank,
            "recall": 1 - found.false_negative,
            "precision": found.precision,
        },
        {part: getattr(trained, part) for part in PARTS},
    )


def _best_f1(weights: train.Weights, x: Any, wanted: Any, n: int) -> float:
    """The threshold at which misses and vain guesses are balanced: the highest F1 score."""
    edges: F32Array | None = None
    counts = np.zeros((2, _F1_POINTS + 2), np.int64)
    for at in range(0, len(x), _SCORE_TOKENS):
        scores = train.scores(weights, x[at : at + _SCORE_TOKENS])
        if edges is None:
            edges = np.quantile(scores, np.linspace(0, 1, _F1_POINTS + 1)).astype(np.float32)
        truth = bits(wanted[at : at + _SCORE_TOKENS], n)
        places = np.searchsorted(edges, scores, side="left")
        counts[0] += np.bincount(places[truth], minlength=_F1_POINTS + 2)
        counts[1] += np.bincount(places[~truth], minlength=_F1_POINTS + 2)
    assert edges is not None
    # Above edge i: the places behind i.
    hits, vain = (np.cumsum(each[::-1])[::-1][1:] for each in counts)
    f1 = 2 * hits / np.maximum(1, hits + vain + counts[0].sum())
    return float(edges[int(np.argmax(f1))])
