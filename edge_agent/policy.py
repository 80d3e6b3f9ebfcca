"""The policy: from what is known before a round to the round's orders. Pure, and cheap enough to run every round.

Where two things pull in different directions, the earlier in this list wins:

1. `privacy: on_device`, `execution: only_device` and answers held to a grammar: no token leaves, whatever the device's
   state.
2. `execution: only_cloud`: never the device's own target.
3. The device's health: heat, battery, power saver, each on the same ladder of four rungs (smaller gamma; no
   speculation; cloud, or a rate cap; critical). The highest rung counts; heat before battery before power saver.
4. What the caller prefers: `prefer_cloud`, `prefer_device`, `speculation`, `max_gamma`.
5. Load: a long queue sends new requests to the cloud.
6. Gain: acceptance against break-even, then the benefit gate.

Unknown readings stand on no rung.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from edge_agent.config import Objective
from edge_agent.decision import Decision, Mode, Reason
from edge_agent.device_state import UNKNOWN_DEVICE, DeviceState, ThermalStatus
from edge_agent.link_state import NO_LINK, LinkState
from edge_agent.request import Execution, Privacy, Speculation
from edge_agent.thresholds import Falling, Rising, Thresholds


class Rung(IntEnum):
    """How far the device is up the ladder."""

    NOMINAL = 0
    EASED = 1
    DIRECT = 2
    OFFLOAD = 3
    CRITICAL = 4


HEAT_REASONS = (Reason.NOMINAL, Reason.DEVICE_WARM, Reason.DEVICE_WARM, Reason.DEVICE_HOT, Reason.DEVICE_CRITICAL)
BATTERY_REASONS = (
    Reason.NOMINAL,
    Reason.BATTERY_LOW,
    Reason.BATTERY_LOW,
    Reason.BATTERY_CRITICAL,
    Reason.BATTERY_CRITICAL,
)
HEADROOM_SPAN_C = 30.0
"""Android's headroom of 1.0 is this far over one of 0.0."""

STATUS_RUNGS = {
    ThermalStatus.NONE: Rung.NOMINAL,
    ThermalStatus.LIGHT: Rung.EASED,
    ThermalStatus.MODERATE: Rung.DIRECT,
    ThermalStatus.SEVERE: Rung.OFFLOAD,
    ThermalStatus.CRITICAL: Rung.CRITICAL,
    ThermalStatus.EMERGENCY: Rung.CRITICAL,
    ThermalStatus.SHUTDOWN: Rung.CRITICAL,
}


@dataclass(frozen=True)
class Wishes:
    """What the request asks for. Limits in tokens. structured: the answer is held to a grammar, known here alone."""

    execution: Execution = Execution.AUTO
    speculation: Speculation = Speculation.AUTO
    privacy: Privacy = Privacy.STANDARD
    max_gamma: int = 16
    structured: bool = False

    @property
    def device_only(self) -> bool:
        """Whether no token of it may leave."""
        return self.privacy is Privacy.ON_DEVICE or self.execution is Execution.ONLY_DEVICE or self.structured


orders = lru_cache(maxsize=64)(Decision)
"""A round's orders are mostly those of an earlier one."""


class Drafting(NamedTuple):
    """What drafting promises here and now.

    gamma: the longest draft that may pay, 0 if none does. probe_gamma: what a probe may try now, 0 for no probe.
    speedup: expected time of a direct token over that of a token with drafts. free: drafting itself costs nothing.
    rests: nothing will be drafted in the round after this one either.
    """

    gamma: int = 0
    probe_gamma: int = 0
    speedup: float = 1.0
    free: bool = True
    rests: bool = False


NO_DRAFTING = Drafting()


class PolicyInputs(NamedTuple):
    """Everything a decision rests on. Times in seconds, lengths in tokens.

    direct_s: a direct token at full clock. cloud_speed: tokens a second by cloud_verify, as a share of direct decoding
    here. link_failed: the cloud failed this request a moment ago.
    """

    wishes: Wishes = Wishes()
    device: DeviceState = UNKNOWN_DEVICE
    link: LinkState = NO_LINK
    link_failed: bool = False
    drafting: Drafting = NO_DRAFTING
    cloud_gamma: int = 0
    cloud_speed: float = 0.0
    direct_s: float = 0.05
    num_generated: int = 0
    num_left: int = 1
    expected_left: int = 1
    context_left: int = 1
    waiting: int = 0
    previous: Mode | None = None


@dataclass(frozen=True)
class PolicyMemory:
    """The device's place on the ladder and since when: what the next decision needs to know of the last ones."""

    heat: Rung = Rung.NOMINAL
    heat_since: float = 0.0
    charge: Rung = Rung.NOMINAL
    charge_since: float = 0.0
    recovered_at: float | None = None


class Pressure(NamedTuple):
    """How hard the device presses, and why."""

    rung: Rung
    reason: Reason
    is_heat: bool = False


NO_PRESSURE = Pressure(Rung.NOMINAL, Reason.NOMINAL)


def decide(
    inputs: PolicyInputs, thresholds: Thresholds, memory: PolicyMemory, now: float
) -> tuple[Decision, PolicyMemory]:
    """The next round's orders, and what to remember. now: seconds of the clock that the memory was written by."""
    memory = climb(inputs.device, thresholds, memory, now)
    pressure = device_pressure(inputs.device, memory)
    decision = _cloud(inputs, thresholds, pressure) or _local(inputs, thresholds, pressure)
    recovering = memory.recovered_at is not None and now - memory.recovered_at < thresholds.min_dwell_s
    if decision.reason is Reason.NOMINAL and recovering:
        decision = Decision(decision.mode, decision.gamma, Reason.RECOVERED, decision.pace_s)
    return decision, memory


def climb(device: DeviceState, thresholds: Thresholds, memory: PolicyMemory, now: float) -> PolicyMemory:
    """Up the ladder at once, down it only after the minimum dwell."""
    heat = heat_rung(device, thresholds, memory.heat)
    charge = battery_rung(device, thresholds, memory.charge)
    if heat < memory.heat and now - memory.heat_since < thresholds.min_dwell_s:
        heat = memory.heat
    if charge < memory.charge and now - memory.charge_since < thresholds.min_dwell_s:
        charge = memory.charge
    if heat is memory.heat and charge is memory.charge:
        return memory
    down = max(heat, charge) < max(memory.heat, memory.charge)
    recovered = now if down and max(heat, charge) is Rung.NOMINAL else None
    return PolicyMemory(
        heat,
        memory.heat_since if heat is memory.heat else now,
        charge,
        memory.charge_since if charge is memory.charge else now,
        recovered,
    )


def heat_rung(device: DeviceState, thresholds: Thresholds, current: Rung) -> Rung:
    """The highest rung that temperature, headroom (both some seconds ahead) or Android's thermal status calls for."""
    rung = Rung.NOMINAL
    if device.temperature_c is not None and thresholds.temperature_c is not None:
        rise = max(device.temperature_slope, 0.0) * thresholds.forecast_s
        ahead = device.temperature_c + min(rise, thresholds.most_ahead_c)
        rung = rising_rung(ahead, thresholds.temperature_c, current)
    if device.headroom is not None:
        rise = max(device.headroom_slope, 0.0) * thresholds.forecast_s
        ahead = device.headroom + min(rise, thresholds.most_ahead_c / HEADROOM_SPAN_C)
        rung = max(rung, rising_rung(ahead, thresholds.headroom, current))
    if device.thermal_status is not None:
        rung = max(rung, STATUS_RUNGS[device.thermal_status])
    return rung


def battery_rung(device: DeviceState, thresholds: Thresholds, current: Rung) -> Rung:
    """The rung for a battery that is running down; none while it charges."""
    if thresholds.battery_percent is None or device.battery_percent is None or not device.on_battery:
        return Rung.NOMINAL
    return falling_rung(device.battery_percent, thresholds.battery_percent, current)


def rising_rung(value: float, ladder: Sequence[Rising], current: Rung) -> Rung:
    """The highest rung that is entered, or was and isn't left yet."""
    for index in range(len(ladder), 0, -1):
        step = ladder[index - 1]
        if value >= step.enter or (current >= index and value >= step.exit):
            return Rung(index)
    return Rung.NOMINAL


def falling_rung(value: float, ladder: Sequence[Falling], current: Rung) -> Rung:
    """The same for a quantity that is worse when lower."""
    for index in range(len(ladder), 0, -1):
        step = ladder[index - 1]
        if value <= step.enter or (current >= index and value <= step.exit):
            return Rung(index)
    return Rung.NOMINAL


def device_pressure(device: DeviceState, memory: PolicyMemory) -> Pressure:
    """The highest rung, with the reason of what stands on it."""
    saver = Rung.DIRECT if device.power_saver and device.charging is not True else Rung.NOMINAL
    highest = max(memory.heat, memory.charge, saver)
    if highest is Rung.NOMINAL:
        return NO_PRESSURE
    if memory.heat is highest:
        return Pressure(highest, HEAT_REASONS[highest], is_heat=True)
    if memory.charge is highest:
        return Pressure(highest, BATTERY_REASONS[highest])
    return Pressure(highest, Reason.POWER_SAVER)


def _cloud(inputs: PolicyInputs, thresholds: Thresholds, pressure: Pressure) -> Decision | None:
    """Orders for the cloud, if it is wanted, allowed and there."""
    wishes = inputs.wishes
    if wishes.device_only:
        return None
    if wishes.execution is Execution.ONLY_CLOUD:
        asked = pressure.reason if pressure.rung >= Rung.OFFLOAD else Reason.REQUESTED
        return _cloud_decision(inputs, thresholds, pressure, asked)
    if not cloud_ready(inputs, thresholds):
        return None
    reason = _cloud_wish(inputs, thresholds, pressure)
    return None if reason is None else _cloud_decision(inputs, thresholds, pressure, reason)


def cloud_ready(inputs: PolicyInputs, thresholds: Thresholds) -> bool:
    """Whether a request may be handed over now."""
    link = inputs.link
    return link.usable and not inputs.link_failed and not link.saturated and link.queue_s <= thresholds.max_queue_s


def _cloud_wish(inputs: PolicyInputs, thresholds: Thresholds, pressure: Pressure) -> Reason | None:
    """Why the cloud should do it; None to stay."""
    execution = inputs.wishes.execution
    if pressure.rung >= (Rung.CRITICAL if execution is Execution.PREFER_DEVICE else Rung.OFFLOAD):
        return pressure.reason
    if execution is Execution.PREFER_CLOUD:
        return Reason.REQUESTED
    if execution is Execution.PREFER_DEVICE:
        return None
    if pressure.rung is Rung.DIRECT and not pressure.is_heat:
        return pressure.reason
    if _queue_presses(inputs, thresholds):
        return Reason.QUEUE_PRESSURE
    if thresholds.objective is Objective.ENERGY and inputs.device.on_battery:
        return Reason.ENERGY
    return None


def _queue_presses(inputs: PolicyInputs, thresholds: Thresholds) -> bool:
    """A long queue sends new requests away; those sent stay away until it has halved."""
    if inputs.previous is not None and not inputs.previous.on_device:
        return inputs.waiting > thresholds.max_waiting // 2
    return inputs.num_generated == 0 and inputs.waiting >= thresholds.max_waiting


def _cloud_decision(inputs: PolicyInputs, thresholds: Thresholds, pressure: Pressure, reason: Reason) -> Decision:
    """Drafting for the cloud while the device can and the link makes it worth while, else handing everything over."""
    gamma = min(inputs.cloud_gamma, inputs.link.gamma_limit, _gamma_limit(inputs, thresholds))
    if pressure.rung > Rung.NOMINAL:
        gamma = (gamma + 1) // 2
    tired = pressure.rung >= (Rung.DIRECT if pressure.is_heat else Rung.OFFLOAD)
    slow = inputs.cloud_speed < thresholds.min_cloud_speed
    if tired or slow or gamma == 0 or inputs.wishes.speculation is Speculation.OFF or reason is Reason.QUEUE_PRESSURE:
        return Decision(Mode.CLOUD_GENERATE, 0, reason)
    return Decision(Mode.CLOUD_VERIFY, gamma, reason)


def _local(inputs: PolicyInputs, thresholds: Thresholds, pressure: Pressure) -> Decision:
    """Orders for the device itself."""
    pace = _pace(inputs, thresholds, pressure.rung)
    reason = _local_reason(inputs, thresholds, pressure)
    # A device that is paced rests between rounds: no pass begins in the pause.
    goes_on = not pace and (inputs.wishes.speculation is Speculation.OFF or inputs.drafting.rests)
    if pressure.rung >= Rung.DIRECT:
        return orders(Mode.LOCAL_DIRECT, 0, reason, pace, goes_on)
    gamma, gain_reason = _speculate(inputs, thresholds)
    if pressure.rung is Rung.EASED:
        gamma = (gamma + 1) // 2
    if gamma == 0:
        return orders(Mode.LOCAL_DIRECT, 0, gain_reason, pace, goes_on)
    return orders(Mode.LOCAL_SPECULATIVE, gamma, gain_reason if reason is Reason.NOMINAL else reason, pace)


def _local_reason(inputs: PolicyInputs, thresholds: Thresholds, pressure: Pressure) -> Reason:
    """The device's reason, or what kept the request from the cloud that it would have gone to."""
    wishes = inputs.wishes
    wanted = pressure.rung >= Rung.OFFLOAD or wishes.execution is Execution.PREFER_CLOUD
    if not wanted or not inputs.link.configured:
        return pressure.reason
    if wishes.device_only:
        if not cloud_ready(inputs, thresholds):
            return pressure.reason
        if wishes.privacy is Privacy.ON_DEVICE:
            return Reason.PRIVACY
        return Reason.REQUESTED if wishes.execution is Execution.ONLY_DEVICE else Reason.STRUCTURED
    if inputs.link_failed or not inputs.link.healthy:
        return Reason.CLOUD_UNAVAILABLE
    return pressure.reason if cloud_ready(inputs, thresholds) else Reason.CLOUD_SATURATED


def _speculate(inputs: PolicyInputs, thresholds: Thresholds) -> tuple[int, Reason]:
    """(gamma, why) with the device at ease."""
    wishes, drafting = inputs.wishes, inputs.drafting
    if wishes.speculation is Speculation.OFF or wishes.max_gamma == 0:
        return 0, Reason.REQUESTED
    if inputs.context_left < 2:
        return 0, Reason.CONTEXT_FULL
    limit = _gamma_limit(inputs, thresholds)
    if wishes.speculation is Speculation.ON:
        return min(max(drafting.gamma, 1), limit), Reason.REQUESTED
    if inputs.num_left < 2 or limit == 0:
        return 0, Reason.BENEFIT_SMALL
    if drafting.gamma == 0:
        crowded = inputs.waiting >= thresholds.max_waiting
        probe = 0 if crowded else min(drafting.probe_gamma, limit)
        return (probe, Reason.PROBE) if probe else (0, Reason.ACCEPTANCE_LOW)
    if (thresholds.gate_free_drafts or not drafting.free) and benefit_s(inputs) < thresholds.benefit_gate_s:
        return 0, Reason.BENEFIT_SMALL
    return min(drafting.gamma, limit), Reason.NOMINAL


def benefit_s(inputs: PolicyInputs) -> float:
    """T_direct - T_spec over what the answer will probably still need."""
    return inputs.expected_left * inputs.direct_s * (1.0 - 1.0 / max(inputs.drafting.speedup, 1e-3))


def _gamma_limit(inputs: PolicyInputs, thresholds: Thresholds) -> int:
    """What request, thresholds and context allow."""
    return max(0, min(inputs.wishes.max_gamma, thresholds.max_gamma, inputs.context_left - 1))


def _pace(inputs: PolicyInputs, thresholds: Thresholds, rung: Rung) -> float:
    """The rate cap: the fewest seconds a token may take; 0 for no cap."""
    stretch = thresholds.stretch[rung - 1] if rung else 1.0
    return stretch * inputs.direct_s if stretch > 1.0 else 0.0
