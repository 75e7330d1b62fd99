"""The border to the ``tokenizers`` library, which raises plain ``Exception``, or a Rust panic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flashd.errors import FlashdError, TokenizerError

REMEDY = "give a tokenizer with --tokenizer tokenizer.json"
# Real vocabularies end at some 300 thousand. The library writes a vocabulary by counting up to its
# highest id, holes and all: twenty seconds at 2**31.
MAX_TOKEN_ID = (1 << 24) - 1


@contextmanager
def library_errors(where: object) -> Iterator[None]:
    """Translate whatever the library says about a tokenizer.

    Args:
        where: the file, for the message.

    Raises:
        TokenizerError: in one line.
    """
    try:
        yield
    except FlashdError:
        raise
    except BaseException as exc:
        # A panic is no Exception, so that nobody takes it for one; its class cannot be imported.
        if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
            raise
        reason = " ".join(str(exc).split())[:200]
        raise TokenizerError(
            f"{where}: not a usable tokenizer ({reason}); download it again or {REMEDY}"
        ) from exc
