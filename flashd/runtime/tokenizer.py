"""Text to token ids and back, chat templates, and text that arrives token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as HFTokenizer

from flashd.errors import RequestError, TokenizerError, tokenizer_errors
from flashd.types import TokenizerSpec

_REPLACEMENT = "\ufffd"
MAX_TEMPLATE_CHARS = 64 << 20


class Tokenizer:
    """A ``tokenizer.json`` with what the bundle's manifest adds to it.

    Args:
        path: the file.
        spec: special tokens and chat template.

    Raises:
        TokenizerError: the file is no tokenizer, or the chat template no Jinja template.
    """

    def __init__(self, path: Path, spec: TokenizerSpec) -> None:
        self.spec = spec
        with tokenizer_errors(lambda reason: f"{path}: not a usable tokenizer ({reason}); convert again"):
            self._inner = HFTokenizer.from_file(str(path))
        vocabulary = self._inner.get_vocab(with_added_tokens=True)
        self.longest_token_chars = max(map(len, vocabulary), default=1)
        self._template = None
        if spec.chat_template:
            try:
                self._template = _Sandbox().from_string(spec.chat_template)
            except Exception as exc:  # TemplateError, RecursionError, whatever a parser can meet
                raise TokenizerError(f"the model's chat template is invalid: {exc}") from exc

    @property
    def has_chat_template(self) -> bool:
        """Whether ``render_chat`` can be used."""
        return self._template is not None

    def encode(self, text: str, *, plain: bool = True) -> list[int]:
        """Token ids of a text; ``plain`` puts the BOS token in front where the model wants it."""
        with tokenizer_errors(lambda reason: f"the model's tokenizer cannot encode this text: {reason}"):
            ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        if plain and self.spec.add_bos and self.spec.bos_id is not None:
            return [self.spec.bos_id, *ids]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Raises:
            RequestError: the model has no template, or the template refuses the messages.
        """
        if self._template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions", code="no_chat_template"
            )
        try:
            text = self._template.render(
                messages=list(messages),
                add_generation_prompt=True,
                bos_token=self.spec.bos_token,
                eos_token=self.spec.eos_token,
            )
        except Exception as exc:  # a template is a program: it may fail in any way
            raise RequestError(
                f"the model's chat template refuses these messages: {exc}", param="messages"
            ) from exc
        ids = self.encode(text, plain=False)
        if self.spec.add_bos and self.spec.bos_id is not None and ids[:1] != [self.spec.bos_id]:
            return [self.spec.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        with tokenizer_errors(lambda reason: f"the model's tokenizer cannot decode these tokens: {reason}"):
            text: str = self._inner.decode(list(ids), skip_special_tokens=True)
        return text


class _Sandbox(ImmutableSandboxedEnvironment):
    """Where chat templates run: no way to Python's objects, no text multiplied without bounds."""

    intercepted_binops = frozenset(("*", "**", "+"))

    def __init__(self) -> None:
        # Unoptimised: constant expressions must not be computed while the template is compiled.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False)
        self.globals["raise_exception"] = _raise

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic of a template; sequences and numbers stay of a size that templates need."""
        size = sum(len(x) if hasattr(x, "__len__") else 0 for x in (left, right))
        factor = max((abs(x) for x in (left, right) if isinstance(x, int)), default=1)
        if size * (factor if operator == "*" else 1) > MAX_TEMPLATE_CHARS or operator == "**":
            raise TemplateError(f"the template's {operator} makes something too large")
        return super().call_binop(context, operator, left, right)


def _raise(message: str) -> None:
    raise TemplateError(message)


class TextStream:
    """Turns one sequence's tokens into text pieces that are final when they leave.

    Holds back bytes of a character that isn't complete, and text that may be the beginning of a
    stop string. Decoding a token needs its neighbours (spaces, bytes), so a short window of
    tokens is decoded again each time, never the whole sequence.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._prefix = 0  # tokens before this are settled context, decoded with the next ones
        self._read = 0  # tokens before this have become text
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; returns text that may be shown now, often empty."""
        if self.stopped:
            return ""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        text = self._tokenizer.decode(self._ids[self._prefix :])
        if len(text) <= len(before) or text.endswith(_REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return self._release(text[len(before) :])

    def flush(self) -> str:
        """Text still held back when the sequence ends; an incomplete character is dropped."""
        before = self._tokenizer.decode(self._ids[self._prefix : self._read])
        rest = self._tokenizer.decode(self._ids[self._prefix :])[len(before) :]
        piece = "" if self.stopped else self._release(rest.rstrip(_REPLACEMENT))
        held, self._held = self._held, ""
        return piece if self.stopped else piece + held

    def _release(self, text: str) -> str:
        text = self._held + text
        cuts = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if cuts:
            self.stopped = True
            self._held = ""
            return text[: min(cuts)]
        keep = _possible_stop(text, self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _possible_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest tail of ``text`` that begins a stop string."""
    for size in range(min(len(text), max(map(len, stops), default=1) - 1), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
