"""Every error that flashd raises on purpose.

Each message says what was got, what was expected and what to do; the command line prints it as
one line, the server puts it into the OpenAI error shape. Lower-level errors (OSError, ValueError
of a library) are translated where they cross into a room: ``raise X(...) from exc``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class FlashdError(Exception):
    """Base of all errors a person is meant to read."""


class ConfigError(FlashdError):
    """A flag, environment variable or configuration value is wrong."""


class ConversionError(FlashdError):
    """``flashd convert`` cannot make a bundle from this source."""


class UnsafePickleError(ConversionError):
    """A checkpoint pickle asks for something other than tensors; nothing of it was executed."""


class OutOfSpaceError(ConversionError):
    """The disk is full, or would be before the conversion ends."""


class CalibrationError(FlashdError):
    """``flashd calibrate`` cannot calibrate this bundle with this text."""


class BundleError(FlashdError):
    """A bundle directory is missing, incomplete, newer than this flashd, or malformed."""


class BundleCorruptError(BundleError):
    """Bytes on disk are not the bytes that were written: size, checksum or short read."""


class DiskReadError(FlashdError):
    """The device or file system did not deliver bytes that the file should hold."""


class TokenizerError(FlashdError):
    """The model has no tokenizer or chat template, or it cannot be used."""


@contextmanager
def tokenizer_errors(message: Callable[[str], str]) -> Iterator[None]:
    """Translate whatever the ``tokenizers`` library says: plain ``Exception``, or a Rust panic.

    Args:
        message: the error's text, made from the library's reason in one line.

    Raises:
        TokenizerError: the block failed.
    """
    try:
        yield
    except FlashdError:
        raise
    except BaseException as exc:
        # A panic is no Exception, so that nobody takes it for one; its class cannot be imported.
        if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
            raise
        raise TokenizerError(message(" ".join(str(exc).split())[:200])) from exc


class RequestError(FlashdError):
    """A client's request is wrong. Maps to one OpenAI-shaped error object.

    Args:
        message: what was got, what was expected.
        code: machine-readable code, e.g. ``context_length_exceeded``.
        param: name of the request field at fault.
        status: HTTP status.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_value",
        param: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.status = status


class InternalError(FlashdError):
    """Something broke inside the daemon; the request is lost, the daemon lives."""


class SocketError(FlashdError):
    """The Unix socket cannot be served or reached."""


class DaemonError(FlashdError):
    """The daemon cannot be started, found or stopped."""
