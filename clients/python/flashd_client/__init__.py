"""Client of flashd, the local daemon that runs language models larger than RAM.

``Client`` is synchronous, ``AsyncClient`` is for asyncio; both speak the daemon's
OpenAI-compatible HTTP over its Unix socket.
"""

from flashd_client._target import default_socket_path
from flashd_client.aio import AsyncClient
from flashd_client.client import Client
from flashd_client.errors import (
    APIError,
    BadRequest,
    ConnectionLost,
    DaemonNotRunning,
    FlashdClientError,
    InvalidResponse,
    RateLimited,
    RequestTimeout,
    ServerError,
    StreamError,
    StreamInterrupted,
)
from flashd_client.types import Chunk, Completion, Health, Message, ModelInfo, Options, Usage

__version__ = "0.1.0"

__all__ = [
    "APIError",
    "AsyncClient",
    "BadRequest",
    "Chunk",
    "Client",
    "Completion",
    "ConnectionLost",
    "DaemonNotRunning",
    "FlashdClientError",
    "Health",
    "InvalidResponse",
    "Message",
    "ModelInfo",
    "Options",
    "RateLimited",
    "RequestTimeout",
    "ServerError",
    "StreamError",
    "StreamInterrupted",
    "Usage",
    "default_socket_path",
]
