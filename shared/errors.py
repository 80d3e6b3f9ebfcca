"""Every error that Souschef raises on purpose.

SouschefError
├── ConfigError                    a setting is unknown or out of range: the start stops
├── RequestError                   the caller's request can't be served; carries an HTTP status
│   ├── BadRequestError            400
│   │   ├── ContextLengthError     400, code context_length_exceeded
│   │   └── UnsupportedFieldError  400, code unsupported_value
│   ├── UnauthorizedError          401
│   ├── ForbiddenError             403
│   ├── NotFoundError              404
│   ├── ConflictError              409
│   ├── GoneError                  410
│   ├── PayloadTooLargeError       413
│   ├── RateLimitedError           429, carries retry_after_s
│   └── OverloadedError            503, carries retry_after_s
├── ModelError                     a model can't be fetched, built or loaded
│   ├── ModelFileError             a file is missing, truncated or altered; names it
│   ├── UnsupportedModelError      an architecture, tokenizer or layout we don't know; names it
│   ├── DownloadError              a registry or hub did not deliver
│   ├── DiskSpaceError             not enough room, with the needed and the free bytes
│   └── TokenizerMismatchError     draft and target, or edge and cloud, count in different tokens
├── EngineError                    inference itself failed
│   └── EngineStoppedError         the inference thread is gone
└── CloudError                     the cloud verifier can't serve this round
    ├── CloudUnavailableError      unreachable, timed out, 5xx, circuit open: safe to go on locally
    ├── CloudRejectedError         4xx: our request was wrong, a retry won't help
    ├── CloudSessionLostError      410: the prefix has to be sent again
    └── CloudProtocolError         the reply isn't what the protocol allows

Errors of httpx, Redis and ONNX Runtime are translated into these once, by the module that owns the library.
"""

from __future__ import annotations

from typing import ClassVar


class SouschefError(Exception):
    """The root: catch it to catch all of ours."""


class ConfigError(SouschefError):
    """A setting is unknown or has a value that isn't allowed."""


class RequestError(SouschefError):
    """A request that can't be served. `param` names the field, `message` says what is allowed."""

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class BadRequestError(RequestError):
    """A value that isn't allowed."""


class ContextLengthError(BadRequestError):
    """Prompt and answer don't fit into the context."""

    code = "context_length_exceeded"


class UnsupportedFieldError(BadRequestError):
    """A field we don't implement, with a value other than its default."""

    code = "unsupported_value"


class UnauthorizedError(RequestError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """The key is good, but not for this."""

    status = 403
    type = "permission_error"


class NotFoundError(RequestError):
    """No such route, model or session."""

    status = 404
    type = "not_found_error"


class ConflictError(RequestError):
    """The request contradicts what has already happened."""

    status = 409
    type = "conflict_error"


class GoneError(RequestError):
    """The session is no longer held: send its prefix again."""

    status = 410
    type = "gone_error"


class PayloadTooLargeError(RequestError):
    """The body is over the limit."""

    status = 413
    code = "payload_too_large"


class RateLimitedError(RequestError):
    """Too many requests of this key."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OverloadedError(RequestError):
    """The queue is full or the service is stopping: try again later."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelError(SouschefError):
    """A model can't be fetched, built or loaded."""


class ModelFileError(ModelError):
    """A model's file is missing, truncated or altered."""


class UnsupportedModelError(ModelError):
    """An architecture, tokenizer or layout we don't know."""


class DownloadError(ModelError):
    """A registry or hub did not deliver."""


class DiskSpaceError(ModelError):
    """Not enough room on the disk."""


class TokenizerMismatchError(ModelError):
    """Two models count in different tokens, so one can't check the other's drafts."""


class EngineError(SouschefError):
    """Inference failed."""


class EngineStoppedError(EngineError):
    """The inference thread has ended; the process can't answer any more."""


class CloudError(SouschefError):
    """The cloud verifier can't serve this round."""


class CloudUnavailableError(CloudError):
    """Unreachable, timed out, overloaded, or the circuit is open."""


class CloudRejectedError(CloudError):
    """The cloud says that our request was wrong."""


class CloudSessionLostError(CloudError):
    """The cloud no longer holds the session's tokens."""


class CloudProtocolError(CloudError):
    """A reply that the protocol doesn't allow."""
