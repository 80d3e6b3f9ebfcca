"""Stops asking a service that doesn't answer, and finds out with one request at a time when it is back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from shared.errors import CloudProtocolError, CloudUnavailableError


class CircuitState(StrEnum):
    """closed: all pass. open: none passes. half_open: one probe may pass."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """Opens after `threshold` failures in a row; after `rest_s` lets one probe through, whose outcome decides.

    A failure is a service that could not be reached, did not answer in time, answered 5xx or nonsense. A caller's
    cancellation and a 4xx say nothing against the service, and don't count. Only the event loop may use it.
    """

    def __init__(self, threshold: int = 3, rest_s: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._threshold = threshold
        self._rest_s = rest_s
        self._clock = clock
        self._num_failures = 0
        self._opened_at: float | None = None
        self._probing = False

    @property
    def state(self) -> CircuitState:
        """Where it stands now."""
        if self._opened_at is None:
            return CircuitState.CLOSED
        return CircuitState.OPEN if self._clock() < self._opened_at + self._rest_s else CircuitState.HALF_OPEN

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around one request.

        Raises:
            CloudUnavailableError: not now.
        """
        state = self.state
        if state is CircuitState.OPEN or (state is CircuitState.HALF_OPEN and self._probing):
            raise CloudUnavailableError("the cloud did not answer lately; it is asked again in a moment")
        is_probe = state is CircuitState.HALF_OPEN
        self._probing = self._probing or is_probe
        try:
            yield
        except (CloudUnavailableError, CloudProtocolError):
            self._failed(is_probe)
            raise
        except Exception:
            self._succeeded()  # It answered, if not as hoped.
            raise
        else:
            self._succeeded()
        finally:
            if is_probe:
                self._probing = False

    def _failed(self, was_probe: bool) -> None:
        self._num_failures += 1
        if was_probe or self._num_failures >= self._threshold:
            self._opened_at = self._clock()

    def _succeeded(self) -> None:
        self._num_failures = 0
        self._opened_at = None
