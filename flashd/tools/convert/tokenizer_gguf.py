"""A ``tokenizer.json`` out of a GGUF file's metadata.

Two kinds: ``gpt2`` (byte-level BPE; ``tokenizer.ggml.pre`` names how text is split first) and
``llama`` (SentencePiece BPE with scores and byte fallback).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from flashd.errors import TokenizerError
from flashd.models.families import shown
from flashd.tools.convert.tokenizer_library import MAX_TOKEN_ID, library_errors
from flashd.types import TokenizerSpec

_Item = TypeVar("_Item", str, int, float)
_KEY = "tokenizer.ggml."
_REMEDY = "give the model's own with --tokenizer tokenizer.json"
# SentencePiece learns pieces of 16 characters; all cuts of one take its length squared.
_MAX_PIECE_CHARS = 256
# llama.cpp's token types that are matched whole in the text.
_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# Pre-tokenizer -> family of splits.
_PRE = {
    "default": "gpt2",
    "gpt-2": "gpt2",
    "smollm": "digits",
    "llama-bpe": "llama3",
    "llama-v3": "llama3",
    "llama3": "llama3",
    "qwen2": "qwen2",
}


def gguf_spec(metadata: Mapping[str, Any], where: str) -> TokenizerSpec | None:
    """Special tokens and chat template. None if the file has no tokenizer and no ids.

    Raises:
        TokenizerError: metadata of another type than expected.
    """
    tokens = _list(metadata, "tokens", str, where) or []
    bos_id = _id(metadata, "bos_token_id")
    ends = [_id(metadata, f"{name}_token_id") for name in ("eos", "eot", "eom")]
    eos_ids = tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    if not tokens and bos_id is None and not eos_ids:
        return None
    template = metadata.get("tokenizer.chat_template")
    add_bos = metadata.get(f"{_KEY}add_bos_token")
    if not isinstance(add_bos, bool):
        # Older files don't say; llama.cpp then adds it for these two.
        pre = _pre(metadata)
        llama3 = isinstance(pre, str) and _PRE.get(pre) == "llama3"
        add_bos = llama3 or metadata.get(f"{_KEY}model") == "llama"
    return TokenizerSpec(
        bos_id=bos_id,
        eos_ids=eos_ids,
        add_bos=add_bos and bos_id is not None,
        chat_template=template if isinstance(template, str) else None,
        bos_token=_token(tokens, bos_id),
        eos_token=_token(tokens, eos_ids[0] if eos_ids else None),
    )


def gguf_tokenizer(metadata: Mapping[str, Any], where: str) -> Tokenizer | None:
    """The tokenizer that the file describes; None if it describes none.

    Raises:
        TokenizerError: a kind or a pre-tokenizer that flashd doesn't know, or no merges.
    """
    kind, tokens = metadata.get(f"{_KEY}model"), _list(metadata, "tokens", str, where)
    if not tokens or kind in (None, "none", "no_vocab"):
        return None
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens, where)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens, where)
    else:
        raise TokenizerError(f"{where}: tokenizer {shown(kind)}, expected gpt2 or llama; {_REMEDY}")
    with library_errors(where):
        _add_whole_tokens(tokenizer, tokens, _list(metadata, "token_type", int, where) or [])
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], where: str) -> Tokenizer:
    pre = _pre(metadata)
    if not isinstance(pre, str) or pre not in _PRE:
        raise TokenizerError(
            f"{where}: pre-tokenizer {shown(pre)}, expected one of {', '.join(_PRE)}; {_REMEDY}"
        )
    pairs = _pairs(metadata, where)
    if pairs is None:
        raise TokenizerError(f"{where}: a BPE tokenizer without merges; {_REMEDY}")
    split = _PRE[pre]
    vocab = {token: index for index, token in enumerate(tokens)}
    # Llama 3 takes a word that is in its vocabulary whole, merges or not.
    tokenizer = _bpe(where, vocab=vocab, merges=pairs, ignore_merges=split == "llama3")
    tokenizer.pre_tokenizer = _splitter(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _splitter(split: str) -> Any:
    """How text is cut into words before merging, as the vocabulary's merges were learned."""
    if split == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split == "digits":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    pattern = Regex(_LLAMA3_SPLIT if split == "llama3" else _QWEN2_SPLIT)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], where: str) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = _pairs(metadata, where)
    if pairs is None:
        scores = _list(metadata, "scores", float, where)
        if scores is None or len(scores) != len(tokens):
            raise TokenizerError(f"{where}: a SentencePiece tokenizer without scores; {_REMEDY}")
        pairs = _merges_from_scores(vocab, scores)
    tokenizer = _bpe(where, vocab=vocab, merges=pairs, fuse_unk=True, byte_fallback=True)
    prefix = metadata.get(f"{_KEY}add_space_prefix") is not False
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="\u2581", prepend_scheme="first" if prefix else "never", split=False
    )
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_from_scores(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to cut a token into two others, best score first: what SentencePiece's BPE does
    by looking up the score of each neighbouring pair (ties as in transformers)."""
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(list(vocab), (scores[index] for index in vocab.values()), strict=True):
        if len(token) > _MAX_PIECE_CHARS:
            continue
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        cuts = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        cuts.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
        merges += [(score, len(left), len(right), left, right) for left, right in cuts]
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in merges]


def _bpe(where: str, **settings: Any) -> Tokenizer:
    with library_errors(where):
        return Tokenizer(models.BPE(**settings))


def _add_whole_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    control = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    defined = [token for token, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])


def _pairs(metadata: Mapping[str, Any], where: str) -> list[tuple[str, str]] | None:
    """Merges, which the file has as two tokens with a space between."""
    merges = _list(metadata, "merges", str, where)
    if merges is None:
        return None
    cut = [merge.partition(" ") for merge in merges]
    return [(left, right) for left, _, right in cut]


def _list(metadata: Mapping[str, Any], name: str, kind: type[_Item], where: str) -> list[_Item] | None:
    """A list whose items are all of one type; None if it is absent."""
    values = metadata.get(_KEY + name)
    if values is None:
        return None
    if not isinstance(values, list) or any(type(item) is not kind for item in values):
        raise TokenizerError(
            f"{where}: {_KEY}{name} is {shown(values)}, expected a list of {kind.__name__}; download the "
            f"file again or {_REMEDY}"
        )
    return values


def _pre(metadata: Mapping[str, Any]) -> Any:
    return metadata.get(f"{_KEY}pre") or "default"


def _id(metadata: Mapping[str, Any], name: str) -> int | None:
    value = metadata.get(_KEY + name)
    return value if type(value) is int and 0 <= value <= MAX_TOKEN_ID else None


def _token(tokens: list[str], token_id: int | None) -> str:
    return tokens[token_id] if token_id is not None and token_id < len(tokens) else ""
