"""What to do about a plan, in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from flashd.tools.plan.report import PlanRow

# Less of a gain is not worth moving memory for.
WORTH_SHARE = 0.10
# So much slower, and nobody notices.
_SAME_SHARE = 0.05


def memory_advice(chosen: PlanRow, others: Sequence[PlanRow]) -> list[str]:
    """Whether more memory, or less, would do.

    Args:
        chosen: what was asked about.
        others: other budgets, by their peak.
    """
    possible = sorted((row for row in others if row.feasible), key=lambda row: row.peak_bytes)
    if not chosen.feasible:
        if not possible:
            return []
        first = possible[0]
        return [f"with --memory {first.memory} it works: {_figures(first)}, {first.peak_bytes / 1e6:,.0f} MB"]
    advice = []
    more = [row for row in possible if row.peak_bytes > chosen.peak_bytes]
    better = [row for row in more if row.ms_per_token < (1 - WORTH_SHARE) * chosen.ms_per_token]
    if better:
        advice.append(_change("add", chosen, better[0]))
        best = min(better, key=lambda row: row.ms_per_token)
        if best.ms_per_token < (1 - WORTH_SHARE) * better[0].ms_per_token:
            advice.append(_change("add", chosen, best))
    elif more:
        advice.append(f"more memory makes a token less than {WORTH_SHARE:.0%} faster")
    less = [
        row
        for row in possible
        if row.peak_bytes < (1 - WORTH_SHARE) * chosen.peak_bytes
        and row.ms_per_token <= (1 + _SAME_SHARE) * chosen.ms_per_token
    ]
    if less and not better:
        advice.append(_change("give", chosen, less[0]))
    return advice


def _change(verb: str, before: PlanRow, after: PlanRow) -> str:
    """``add 600 MB (--memory 65%): k 1 -> 9, 120 -> 62 ms per token (-48 %)``."""
    difference = abs(after.peak_bytes - before.peak_bytes) / 1e6
    amount = f"{difference:,.0f} MB{' less' if verb == 'give' else ''}"
    what = []
    if before.window_rows or after.window_rows:
        what.append(f"k {before.k} -> {after.k}")
    if before.resident_layers != after.resident_layers:
        what.append(f"{before.resident_layers} -> {after.resident_layers} layers in RAM")
    gain = after.ms_per_token / before.ms_per_token - 1
    what.append(f"{before.ms_per_token:.0f} -> {after.ms_per_token:.0f} ms per token ({100 * gain:+.0f} %)")
    return f"{verb} {amount} (--memory {after.memory}): {', '.join(what)}"


def _figures(row: PlanRow) -> str:
    return (
        f"k {row.k}, {row.ms_per_token:.0f} ms per token"
        if row.window_rows
        else (f"{row.resident_layers} layers in RAM, {row.ms_per_token:.0f} ms per token")
    )


def model_advice(
    *, relu: bool, calibrated: bool, streamed: bool, requested: float | None, break_even: float | None
) -> list[str]:
    """What the model itself could do better.

    Args:
        relu: whether its activation is one that is zero for most neurons.
        calibrated: whether it has predictors.
        streamed: whether layers are streamed for every token.
        requested: share of a layer's neurons that a token requests; None without masks.
        break_even: share above which reading a layer whole is as fast; None where unknown.
    """
    advice = []
    if not calibrated and streamed and relu:
        advice.append("its activation is ReLU: flashd calibrate lets it read only the neurons that fire")
    if requested is not None and break_even is not None and requested > break_even:
        advice.append(
            f"a token requests {requested:.0%} of a layer's neurons, and reading more than {break_even:.0%} "
            "one by one is slower than the whole layer: a small window does not pay; flashd reorder may help"
        )
    return advice
