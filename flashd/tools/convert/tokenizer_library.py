"""The border to the ``tokenizers`` library, which raises plain ``Exception``, or a Rust panic."""

from __future__ import annotations

from contextlib import AbstractContextManager

from flashd.errors import tokenizer_errors

REMEDY = "give a tokenizer with --tokenizer tokenizer.json"
# Real vocabularies end at some 300 thousand. The library writes a vocabulary by counting up to its
# highest id, holes and all: twenty seconds at 2**31.
MAX_TOKEN_ID = (1 << 24) - 1


def library_errors(where: object) -> AbstractContextManager[None]:
    """Translate whatever the library says about the tokenizer of a file, named in the message."""
    return tokenizer_errors(
        lambda reason: f"{where}: not a usable tokenizer ({reason}); download it again or {REMEDY}"
    )
