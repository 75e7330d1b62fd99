"""The bundle's tokenizer: ``tokenizer.json`` and what that file doesn't say.

The runtime encodes without special tokens and puts ``bos_id`` in front if ``add_bos``; whatever
a source's post-processor adds is therefore looked up here once and never doubled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer

from flashd.errors import TokenizerError
from flashd.tools.convert.checkpoint import Checkpoint, read_json
from flashd.tools.convert.tokenizer_gguf import gguf_spec, gguf_tokenizer
from flashd.types import TokenizerSpec

_REMEDY = "give a tokenizer with --tokenizer tokenizer.json"
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
        raise TokenizerError(f"{given}: no such file; {_REMEDY}")
    if checkpoint.is_gguf:
        return _of_gguf(checkpoint, given)
    folder = given if given is not None and given.is_dir() else checkpoint.where
    tokenizer = _loaded(given) if given is not None and given.is_file() else _from_folder(folder, checkpoint)
    if given is not None and tokenizer is None:
        raise TokenizerError(f"{given}: holds no tokenizer.json; {_REMEDY}")
    return _described(tokenizer, folder, checkpoint)


def _of_gguf(checkpoint: Checkpoint, given: Path | None) -> Tokenizer:
    spec = gguf_spec(checkpoint.config)
    if given is not None:
        path = given / "tokenizer.json" if given.is_dir() else given
        return Tokenizer(_loaded(path).to_str(), spec)
    tokenizer = gguf_tokenizer(checkpoint.config, str(checkpoint.where))
    return Tokenizer(tokenizer.to_str() if tokenizer else None, spec)


def _loaded(path: Path) -> HFTokenizer:
    """A ``tokenizer.json``, without the truncation and padding of somebody's training."""
    try:
        tokenizer = HFTokenizer.from_file(str(path))
    except Exception as exc:  # the library raises plain Exception
        reason = " ".join(str(exc).split())[:200]
        raise TokenizerError(
            f"{path}: not a usable tokenizer ({reason}); download it again or {_REMEDY}"
        ) from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _from_folder(folder: Path, checkpoint: Checkpoint) -> HFTokenizer | None:
    if (folder / "tokenizer.json").is_file():
        return _loaded(folder / "tokenizer.json")
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if vocab.is_file() and merges.is_file():
        tokenizer = _byte_level_bpe(folder, vocab, merges)
        _put_bos_in_front(tokenizer, folder, checkpoint)
        return tokenizer
    for name in ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"):
        if (folder / name).is_file():
            raise TokenizerError(
                f"{folder / name}: a SentencePiece model, expected tokenizer.json; load it with "
                f"transformers' AutoTokenizer and save_pretrained it, or {_REMEDY}"
            )
    return None


def _byte_level_bpe(folder: Path, vocab: Path, merges: Path) -> HFTokenizer:
    """GPT-2's tokenizer from its two files, as OPT has them."""
    settings = _optional_json(folder / "tokenizer_config.json")
    try:
        model = models.BPE.from_file(str(vocab), str(merges))
    except Exception as exc:  # the library raises plain Exception
        raise TokenizerError(
            f"{vocab}: not a usable vocabulary ({exc}); download it again or {_REMEDY}"
        ) from exc
    tokenizer = HFTokenizer(model)
    prefix = settings.get("add_prefix_space") is True
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    specials = {_text(_special(folder, settings, name)) for name in _SPECIAL} - {""}
    decoder = settings.get("added_tokens_decoder")
    added: dict[int, Any] = {}
    if isinstance(decoder, dict):
        added = {int(key): value for key, value in decoder.items() if str(key).isdigit()}
    for content, token_id in _optional_json(folder / "added_tokens.json").items():
        if isinstance(token_id, int):
            added.setdefault(token_id, content)
    for _, token in sorted(added.items()):
        _add(tokenizer, token, specials)
    for name in _SPECIAL:
        token = _special(folder, settings, name)
        if _text(token):
            _add(tokenizer, token, specials)
    return tokenizer


def _put_bos_in_front(tokenizer: HFTokenizer, folder: Path, checkpoint: Checkpoint) -> None:
    """These files carry no post-processor but a setting, and OPT's tokenizer added BOS unasked."""
    settings = _optional_json(folder / "tokenizer_config.json")
    wanted = settings.get("add_bos_token")
    if not (wanted if isinstance(wanted, bool) else checkpoint.plan.spec.family == "opt"):
        return
    bos_id = next(iter(_ids(checkpoint.config.get("bos_token_id"))), None)
    text = _text(_special(folder, settings, "bos_token")) or _token(tokenizer, bos_id)
    for token_id in _known(tokenizer, text):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{text} $A", pair=f"{text} $A $B", special_tokens=[(text, token_id)]
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
    settings = _optional_json(folder / "tokenizer_config.json")
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
    prefix = _prefix(tokenizer)
    bos_id = bos_id if prefix is None else prefix
    spec = replace(
        spec,
        bos_id=bos_id,
        add_bos=prefix is not None,
        bos_token=bos_text or _token(tokenizer, bos_id),
        eos_token=eos_text or _token(tokenizer, next(iter(spec.eos_ids), None)),
    )
    return Tokenizer(tokenizer.to_str(), spec)


def _prefix(tokenizer: HFTokenizer) -> int | None:
    """The token that the post-processor puts in front of every text, if it does."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    dressed = tokenizer.encode("a", add_special_tokens=True).ids
    return dressed[0] if dressed != plain and dressed[1 : 1 + len(plain)] == plain else None


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special(folder: Path, settings: dict[str, Any], name: str) -> Any:
    value = settings.get(name)
    return value if value is not None else _optional_json(folder / "special_tokens_map.json").get(name)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _text(token: Any) -> str:
    """Text of a special token, written plainly or as an ``AddedToken``."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else ""


def _ids(value: Any) -> Iterable[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if type(item) is int and item >= 0]


def _known(tokenizer: HFTokenizer, text: str) -> list[int]:
    token_id = tokenizer.token_to_id(text) if text else None
    return [] if token_id is None else [token_id]


def _token(tokenizer: HFTokenizer, token_id: int | None) -> str:
    return (tokenizer.id_to_token(token_id) or "") if token_id is not None else ""
