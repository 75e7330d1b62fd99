"""The bundle's tokenizer: ``tokenizer.json`` and what that file doesn't say.

The runtime encodes without special tokens and puts ``bos_id`` in front if ``add_bos``; whatever
a source's post-processor adds is therefore looked up here once and never doubled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer

from flashd.errors import TokenizerError
from flashd.models.families import shown
from flashd.tools.convert.checkpoint import Checkpoint
from flashd.tools.convert.side_files import MAX_VOCABULARY_BYTES, read_json, read_text
from flashd.tools.convert.tokenizer_gguf import gguf_spec, gguf_tokenizer
from flashd.tools.convert.tokenizer_library import MAX_TOKEN_ID, REMEDY, library_errors
from flashd.types import TokenizerSpec

_SETTINGS = "tokenizer_config.json"
_DECIMAL = re.compile(r"[0-9]{1,9}")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class Tokenizer:
    """Text of ``tokenizer.json`` (None: the model has none) and the bundle's spec of it."""

    json: str | None
    spec: TokenizerSpec | None


def build_tokenizer(checkpoint: Checkpoint, given: Path | None) -> Tokenizer:
    """The tokenizer of a checkpoint.

    Args:
        checkpoint: the source.
        given: a ``tokenizer.json``, or a directory, that replaces the source's own.

    Raises:
        TokenizerError: there is one, but flashd cannot use it.
    """
    if given is not None and not given.exists():
        raise TokenizerError(f"{given}: no such file; {REMEDY}")
    tokenizer = _of_gguf(checkpoint, given) if checkpoint.is_gguf else _of_hf(checkpoint, given)
    spec, vocab_size = tokenizer.spec, checkpoint.plan.spec.vocab_size
    if spec is not None and spec.add_bos and spec.bos_id is not None and spec.bos_id >= vocab_size:
        raise TokenizerError(
            f"{given or checkpoint.where}: every prompt would begin with token {spec.bos_id}, expected one "
            f"of the model's {vocab_size}; {REMEDY} that belongs to the model"
        )
    return tokenizer


def _of_hf(checkpoint: Checkpoint, given: Path | None) -> Tokenizer:
    folder = given if given is not None and given.is_dir() else checkpoint.where
    tokenizer = _loaded(given) if given is not None and given.is_file() else _from_folder(folder, checkpoint)
    if given is not None and tokenizer is None:
        raise TokenizerError(f"{given}: holds no tokenizer.json; {REMEDY}")
    return _described(tokenizer, folder, checkpoint)


def _of_gguf(checkpoint: Checkpoint, given: Path | None) -> Tokenizer:
    spec = gguf_spec(checkpoint.config, str(checkpoint.where))
    if given is not None:
        path = given / "tokenizer.json" if given.is_dir() else given
        return Tokenizer(_loaded(path).to_str(), spec)
    tokenizer = gguf_tokenizer(checkpoint.config, str(checkpoint.where))
    with library_errors(checkpoint.where):
        return Tokenizer(tokenizer.to_str() if tokenizer else None, spec)


def _loaded(path: Path) -> HFTokenizer:
    """A ``tokenizer.json``, without the truncation and padding of somebody's training."""
    text = read_text(path, MAX_VOCABULARY_BYTES)
    with library_errors(path):
        tokenizer = HFTokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        highest = max(tokenizer.get_vocab().values(), default=0)
    if highest > MAX_TOKEN_ID:
        raise _wrong(path, "a token's id", highest, f"at most {MAX_TOKEN_ID}")
    return tokenizer


def _from_folder(folder: Path, checkpoint: Checkpoint) -> HFTokenizer | None:
    if (folder / "tokenizer.json").is_file():
        return _loaded(folder / "tokenizer.json")
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if vocab.is_file() and merges.is_file():
        with library_errors(vocab):
            tokenizer = _byte_level_bpe(folder, vocab, merges)
            _put_bos_in_front(tokenizer, folder, checkpoint)
            return tokenizer
    for name in ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"):
        if (folder / name).is_file():
            raise TokenizerError(
                f"{folder / name}: a SentencePiece model, expected tokenizer.json; load it with "
                f"transformers' AutoTokenizer and save_pretrained it, or {REMEDY}"
            )
    return None


def _byte_level_bpe(folder: Path, vocab: Path, merges: Path) -> HFTokenizer:
    """GPT-2's tokenizer from its two files, as OPT has them."""
    settings = _optional_json(folder / _SETTINGS)
    tokenizer = HFTokenizer(models.BPE(vocab=_vocabulary(vocab), merges=_merges(merges)))
    prefix = settings.get("add_prefix_space") is True
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    specials = {_text(_special(folder, settings, name)) for name in _SPECIAL} - {""}
    added: dict[int, Any] = {}
    for key, token in _object(folder, settings, "added_tokens_decoder").items():
        if not _DECIMAL.fullmatch(key):
            raise _wrong(folder / _SETTINGS, "added_tokens_decoder", key, "token ids as keys")
        added[int(key)] = token
    for content, token_id in _optional_json(folder / "added_tokens.json").items():
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise _wrong(folder / "added_tokens.json", f"token {shown(content)}", token_id, "a token id")
        added.setdefault(token_id, content)
    for token_id in sorted(added):
        _add(tokenizer, added[token_id], specials)
    for name in _SPECIAL:
        token = _special(folder, settings, name)
        if _text(token):
            _add(tokenizer, token, specials)
    return tokenizer


def _vocabulary(path: Path) -> dict[str, int]:
    values = read_json(path, MAX_VOCABULARY_BYTES)
    for token, token_id in values.items():
        if type(token_id) is not int or not 0 <= token_id <= MAX_TOKEN_ID:
            raise _wrong(path, f"token {shown(token)}", token_id, "a token id")
    return values


def _merges(path: Path) -> list[tuple[str, str]]:
    lines = read_text(path, MAX_VOCABULARY_BYTES).split("\n")
    pairs = []
    for number, line in enumerate(lines, 1):
        left, _, right = line.removesuffix("\r").partition(" ")
        if line.startswith("#version") or not line.strip():
            continue
        if not left or not right or " " in right:
            raise _wrong(path, f"line {number}", line, "two tokens with a space between")
        pairs.append((left, right))
    return pairs


def _put_bos_in_front(tokenizer: HFTokenizer, folder: Path, checkpoint: Checkpoint) -> None:
    """These files carry no post-processor but a setting, and OPT's tokenizer added BOS unasked."""
    settings = _optional_json(folder / _SETTINGS)
    wanted = settings.get("add_bos_token")
    if not (wanted if isinstance(wanted, bool) else checkpoint.plan.spec.family == "opt"):
        return
    bos_id = next(iter(_ids(checkpoint.config.get("bos_token_id"))), None)
    text = _text(_special(folder, settings, "bos_token")) or _token(tokenizer, bos_id)
    for token_id in _known(tokenizer, text):
        tokenizer.post_processor = processors.TemplateProcessing(
            # A name for the token: its own text may mean something in a template.
            single="bos $A",
            pair="bos $A $B",
            special_tokens=[{"id": "bos", "ids": [token_id], "tokens": [text]}],
        )


def _add(tokenizer: HFTokenizer, token: Any, specials: set[str]) -> None:
    """Add one token, as text or in the way transformers writes ``AddedToken``."""
    fields = token if isinstance(token, dict) else {}
    special = fields.get("special") is True or _text(token) in specials
    made = AddedToken(
        _text(token),
        single_word=fields.get("single_word") is True,
        lstrip=fields.get("lstrip") is True,
        rstrip=fields.get("rstrip") is True,
        normalized=fields.get("normalized", not special) is True,
        special=special,
    )
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([made])


def _described(tokenizer: HFTokenizer | None, folder: Path, checkpoint: Checkpoint) -> Tokenizer:
    """What ``tokenizer.json`` doesn't say, from the files around it."""
    config = checkpoint.config
    generation = _optional_json(checkpoint.where / "generation_config.json")
    settings = _optional_json(folder / _SETTINGS)
    bos_text, eos_text = (_text(_special(folder, settings, name)) for name in ("bos_token", "eos_token"))
    eos_ids = [*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id"))]
    bos_ids = [*_ids(generation.get("bos_token_id")), *_ids(config.get("bos_token_id"))]
    if tokenizer is not None:
        # The tokenizer's own idea of BOS counts first: it is what prompts are prefixed with.
        bos_ids = [*_known(tokenizer, bos_text), *bos_ids]
        eos_ids += _known(tokenizer, eos_text)
    bos_id = bos_ids[0] if bos_ids else None
    spec = TokenizerSpec(
        bos_id=bos_id,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        chat_template=_chat_template(folder, settings),
        bos_token=bos_text,
        eos_token=eos_text,
    )
    if tokenizer is None:
        has_ids = bos_id is not None or spec.eos_ids
        return Tokenizer(None, spec if has_ids else None)
    with library_errors(folder):
        prefix, text = _prefix(tokenizer), tokenizer.to_str()
    bos_id = bos_id if prefix is None else prefix
    spec = replace(
        spec,
        bos_id=bos_id,
        add_bos=prefix is not None,
        bos_token=bos_text or _token(tokenizer, bos_id),
        eos_token=eos_text or _token(tokenizer, next(iter(spec.eos_ids), None)),
    )
    return Tokenizer(text, spec)


def _prefix(tokenizer: HFTokenizer) -> int | None:
    """The token that the post-processor puts in front of every text, if it does."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    dressed = tokenizer.encode("a", add_special_tokens=True).ids
    return dressed[0] if dressed != plain and dressed[1 : 1 + len(plain)] == plain else None


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, dict) and item.get("name") == "default"]
        template = named[-1].get("template") if named else None
    if template is not None and not isinstance(template, str):
        raise _wrong(folder / _SETTINGS, "chat_template", template, "a string, or a list of named ones")
    return template


def _special(folder: Path, settings: dict[str, Any], name: str) -> Any:
    value = settings.get(name)
    return value if value is not None else _optional_json(folder / "special_tokens_map.json").get(name)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _object(folder: Path, settings: dict[str, Any], name: str) -> dict[str, Any]:
    value = settings.get(name)
    if value is not None and not isinstance(value, dict):
        raise _wrong(folder / _SETTINGS, name, value, "an object")
    return value or {}


def _wrong(path: Path, what: str, got: object, expected: str) -> TokenizerError:
    return TokenizerError(
        f"{path}: {what} is {shown(got)}, expected {expected}; download it again or {REMEDY}"
    )


def _text(token: Any) -> str:
    """Text of a special token, written plainly or as an ``AddedToken``."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else ""


def _ids(value: Any) -> Iterable[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if type(item) is int and 0 <= item <= MAX_TOKEN_ID]


def _known(tokenizer: HFTokenizer, text: str) -> list[int]:
    token_id = tokenizer.token_to_id(text) if text else None
    return [] if token_id is None else [token_id]


def _token(tokenizer: HFTokenizer, token_id: int | None) -> str:
    return (tokenizer.id_to_token(token_id) or "") if token_id is not None else ""
