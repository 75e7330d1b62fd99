"""Inverse frequencies of rotary position embeddings (arXiv 2104.09864), scaling applied.

They follow ``transformers``' ``modeling_rope_utils`` operation by operation in float32: torch
evaluates ``scalar / tensor`` as ``reciprocal(tensor) * scalar``, which rounds twice. The power
itself is rounded correctly here; torch's differs from CPU to CPU by one unit in the last place.
"""

from __future__ import annotations

from math import pi
from typing import Any

import numpy as np

from flashd.errors import ConversionError
from flashd.models.families.base import Config, shown
from flashd.types import F32Array

SCALINGS = ("default", "linear", "llama3")
_DEFAULT_THETA = 10_000.0
_ONE = np.float32(1)


def base_frequencies(theta: float, d_head: int) -> F32Array:
    """``theta ** (-2i / d_head)`` without scaling: float32 ``[d_head / 2]``."""
    exponent = np.arange(0, d_head, 2, dtype=np.float32) / np.float32(d_head)
    with np.errstate(all="ignore"):  # the caller looks at what comes out
        power = np.power(np.float64(np.float32(theta)), exponent.astype(np.float64)).astype(np.float32)
        return np.asarray(_ONE / power, np.float32)


def usable(frequencies: F32Array, where: str, cause: str) -> F32Array:
    """The same frequencies, if a model can turn by them.

    Args:
        frequencies: float32, any shape.
        where: the file, for the message.
        cause: the setting or tensor that they follow from.

    Raises:
        ConversionError: one of them isn't finite and positive.
    """
    if not (np.isfinite(frequencies) & (frequencies >= np.finfo(np.float32).tiny)).all():
        raise ConversionError(
            f"{where}: {cause} gives rotary frequencies that are not finite and positive, expected such as "
            "other models have; download the file again or correct it"
        )
    return frequencies


def hf_frequencies(config: Config, d_head: int, max_context: int) -> F32Array:
    """Frequencies of a Hugging Face configuration: ``rope_parameters`` (transformers 5), or
    ``rope_theta`` with ``rope_scaling``.

    Raises:
        ConversionError: a scaling other than default, linear and llama3, or a partial rotation.
    """
    settings = {**config.section("rope_scaling"), **config.section("rope_parameters")}
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if config.values.get(key) is not None:
            # The top-level original length outranks the nested one, as in transformers.
            if key == "original_max_position_embeddings":
                settings[key] = config.values[key]
            settings.setdefault(key, config.values[key])
    rope = Config(settings, f"{config.where}: rope")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in SCALINGS:
        raise config.refused(f"RoPE scaling {shown(kind)}", f"one of {', '.join(SCALINGS)}")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise config.refused("partial_rotary_factor", "heads that rotate whole")
    theta = rope.number("rope_theta", _DEFAULT_THETA)
    frequencies = usable(base_frequencies(theta, d_head), rope.where, f"rope_theta {theta}")
    if kind == "linear":
        factor = rope.number("factor")
        return usable(linear_scaled(frequencies, factor), rope.where, f"factor {factor}")
    if kind == "llama3":
        scaled = _llama3_scaled(frequencies, rope, max_context)
        factors = ("factor", "low_freq_factor", "high_freq_factor")
        cause = ", ".join(f"{key} {rope.number(key)}" for key in factors)
        return usable(scaled, rope.where, cause)
    return frequencies


def linear_scaled(frequencies: F32Array, factor: float) -> F32Array:
    """Positional interpolation: all frequencies divided by one factor."""
    with np.errstate(all="ignore"):
        return np.asarray(frequencies / np.float32(factor), np.float32)


def _llama3_scaled(frequencies: F32Array, rope: Config, max_context: int) -> F32Array:
    """Llama 3.1: long waves are stretched, short ones kept, those between interpolated."""
    factor, low, high = (rope.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if low == high:
        raise rope.refused(f"low_freq_factor = high_freq_factor = {low}", "two different factors")
    original = rope.integer("original_max_position_embeddings", max_context)
    with np.errstate(all="ignore"):
        wavelength = (_ONE / frequencies) * np.float32(2 * pi)
        is_long = wavelength > np.float32(original / low)
        is_short = wavelength < np.float32(original / high)
        scaled = np.where(is_long, frequencies / np.float32(factor), frequencies)
        smooth: Any = ((_ONE / wavelength) * np.float32(original) - np.float32(low)) / np.float32(high - low)
        smoothed = (_ONE - smooth) * scaled / np.float32(factor) + smooth * scaled
        return np.asarray(np.where(~is_short & ~is_long, smoothed, scaled), np.float32)
