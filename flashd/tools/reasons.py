"""Why a read engine doesn't work, without what only its caller may do about it."""

from __future__ import annotations

import re

_REFUSED = re.compile(r"^.*?: backend \w+: (?P<why>.*?)(?:; use backend auto)?$", re.DOTALL)


def why_not(error: Exception) -> str:
    """The reason in the message of ``open_engine``'s errors: its caller named the file and the backend
    itself, and ``use backend auto`` is no advice where every backend is tried on purpose."""
    match = _REFUSED.match(str(error))
    return match["why"] if match else str(error)
