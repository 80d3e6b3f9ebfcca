"""The heartbeat: how this device fares, told to the cloud now and then, where its owner wants that.

It is sent by the clock, whatever is asked meanwhile. Requests that must stay on the device cause none and leave no
trace in it. What a device can't hide is that it worked: it is warmer then, and its battery lower; both are told in
whole numbers.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, get_args

from edge_agent.cloud_client import CloudClient
from edge_agent.cloud_link import may_leave
from edge_agent.decision import Decision
from edge_agent.device_state import DeviceState
from edge_agent.piece import Piece
from edge_agent.policy import Rung, heat_rung
from edge_agent.request import GenerationRequest
from edge_agent.thresholds import Thresholds
from shared.errors import CloudError
from shared.protocol import DeviceReport, HeatName

logger = logging.getLogger(__name__)

LONGEST_BACKOFF = 16
"""Intervals between two reports to a cloud that takes none."""
MAX_NAME = 128
HEAT_NAMES: tuple[HeatName, ...] = get_args(HeatName)
"""By rung."""


class Fleet(Protocol):
    """What an agent tells its fleet of."""

    def count(self, request: GenerationRequest, piece: Piece) -> None:
        """A round was done for a request."""

    async def run(self) -> None:
        """Report until cancelled."""


class NoFleet:
    """An agent that reports to nobody."""

    def count(self, request: GenerationRequest, piece: Piece) -> None:
        """Nothing is kept."""

    async def run(self) -> None:
        """Nothing is sent."""


@dataclass
class Rounds:
    """The rounds since the last report, of requests that may leave the device."""

    last: Decision | None = None
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    decode_s: float = 0.0

    def add(self, piece: Piece) -> None:
        """Count one; a first round is mostly its prompt, so its time is no measure of speed."""
        self.last = piece.round.decision
        self.drafted += len(piece.round.draft)
        self.accepted += piece.num_accepted
        if piece.round.number:
            self.tokens += len(piece.tokens)
            self.decode_s += piece.wait_s


class FleetReporter:
    """Sends a `DeviceReport` every `every_s` seconds or so: scattered, so that a fleet that was started together does
    not come together, and ever more rarely while the cloud takes none."""

    def __init__(
        self,
        client: CloudClient,
        device_id: str,
        model: str,
        device: Callable[[], DeviceState],
        thresholds: Callable[[], Thresholds],
        every_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._device_id = device_id
        self._model = model[:MAX_NAME]
        self._device = device
        self._thresholds = thresholds
        self._every_s = every_s
        self._sleep = sleep
        self._rounds = Rounds()

    def count(self, request: GenerationRequest, piece: Piece) -> None:
        """See `Fleet.count`. What must stay on the device isn't counted."""
        if may_leave(request):
            self._rounds.add(piece)

    async def run(self) -> None:
        """See `Fleet.run`."""
        await self._sleep(self._every_s * random.random())
        backoff, last_problem = 1, ""
        while True:
            problem = ""
            try:
                await self._client.report(self.report())
            except CloudError as error:
                problem = str(error)
            backoff = min(2 * backoff, LONGEST_BACKOFF) if problem else 1
            if problem and problem != last_problem:
                logger.warning("fleet: %s", problem)
            last_problem = problem
            await self._sleep(self._every_s * backoff * random.uniform(0.75, 1.25))

    def report(self) -> DeviceReport:
        """How the device fares now; the rounds are counted anew from here on."""
        rounds, self._rounds = self._rounds, Rounds()
        device, last = self._device(), rounds.last
        return DeviceReport(
            device_id=self._device_id,
            model=self._model,
            heat=_heat(device, self._thresholds()),
            temperature_c=_whole(device.temperature_c),
            battery_percent=_whole(device.battery_percent),
            charging=device.charging,
            mode=last.mode.value if last else None,
            gamma=last.gamma if last else None,
            reason=last.reason.value if last else None,
            acceptance_rate=round(rounds.accepted / rounds.drafted, 3) if rounds.drafted else None,
            tokens_per_second=round(rounds.tokens / rounds.decode_s, 1) if rounds.decode_s > 0 else None,
        )


def kept_device_id(path: Path) -> str:
    """The random id in the file, made at the first time. A device that can't keep one has another at each start."""
    try:
        kept = path.read_text(encoding="ascii").strip()
        if re.fullmatch("[0-9a-f]{32}", kept):
            return kept
    except (OSError, UnicodeDecodeError):
        pass
    made = uuid.uuid4().hex
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{made}\n", encoding="ascii")
    except OSError as error:
        logger.warning("the device's id can't be kept in %s: %s", path, error.strerror or error)
    return made


def _heat(device: DeviceState, thresholds: Thresholds) -> HeatName | None:
    """The rung that the readings alone stand on: the policy's own memory knows of every request."""
    if device.temperature_c is None and device.headroom is None and device.thermal_status is None:
        return None
    return HEAT_NAMES[heat_rung(device, thresholds, Rung.NOMINAL)]


def _whole(value: float | None) -> float | None:
    return None if value is None else float(round(value))
