"""What goes in and what comes out, as plain typed values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict


class Message(TypedDict):
    """One turn of a chat; ``role`` is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


class Options(TypedDict, total=False):
    """Keyword arguments of every generating method. What is not given, the daemon decides.

    Keys:
        model: id from ``models()``; a daemon serves one model, so it may stay away.
        max_tokens: most tokens to generate, > 0.
        temperature: 0 is greedy.
        top_p: nucleus sampling, in (0, 1].
        top_k: sample from the k likeliest tokens only; 0 is no limit.
        seed: makes sampling repeatable.
        stop: text or texts that end the answer; they are not part of it.
        ignore_eos: go on after the model's end-of-text token.
        return_tokens: also return the ids of the generated tokens.
    """

    model: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop: str | Sequence[str]
    ignore_eos: bool
    return_tokens: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer.

    Attributes:
        text: the generated text, without the prompt.
        finish_reason: ``stop`` (end of text or a stop string) or ``length`` (``max_tokens``, context).
        usage: token counts.
        tokens: ids of the generated tokens, with ``return_tokens``.
        model: id of the model that answered.
        id: the request's id, as in the daemon's log.
    """

    text: str
    finish_reason: str | None
    usage: Usage
    tokens: tuple[int, ...] | None
    model: str
    id: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer; texts concatenate to the whole.

    ``finish_reason`` is set on the last piece of text, ``usage`` on the last chunk of all;
    ``tokens`` are the ids that belong to this chunk, with ``return_tokens``.
    """

    text: str
    finish_reason: str | None
    usage: Usage | None
    tokens: tuple[int, ...] | None
    model: str
    id: str


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One served model. ``created`` is seconds since 1970, 0 if unknown."""

    id: str
    owned_by: str
    created: int


@dataclass(frozen=True, slots=True)
class Health:
    """``status`` is the daemon's word (``ok``, ``loading``); ``ready`` says if it takes requests."""

    ready: bool
    status: str
