"""Routes of the device and the policy: what is known, what was decided and why, and what may be changed."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict

from edge_agent.device import reading_values
from edge_agent.http_errors import ERRORS
from edge_agent.openai_api import agent_of
from edge_agent.policy_controller import PolicyEngine
from edge_agent.sensors import DevicePush
from shared.errors import NotFoundError

router = APIRouter(responses=ERRORS)


class ProfileChoice(BaseModel):
    """The simulated device to be."""

    model_config = ConfigDict(extra="forbid")

    profile: str


@router.get("/v1/device")
async def get_device(request: Request) -> dict[str, Any]:
    """The last reading as it came with its age, and what the policy makes of it. Unknown is null."""
    sampler = agent_of(request).device.sampler
    reading, state = sampler.last_reading, sampler.state()
    return {
        "source": state.source,
        "age_s": _rounded(state.age_s),
        "reading": reading_values(reading) if reading is not None else None,
        "state": {name: _rounded(value) for name, value in asdict(state).items() if name not in ("age_s", "source")},
    }


@router.post("/v1/device")
async def push_device(body: DevicePush, request: Request) -> dict[str, Any]:
    """An app tells what it knows of the device."""
    agent_of(request).device.push(body)
    return await get_device(request)


@router.get("/v1/device/profiles")
async def list_profiles(request: Request) -> dict[str, Any]:
    """The simulated devices to choose from, where the device is simulated."""
    device = agent_of(request).device
    return {"profiles": device.profiles(), "current": device.phone.profile.name if device.phone else None}


@router.post("/v1/device/profile")
async def choose_profile(body: ProfileChoice, request: Request) -> dict[str, Any]:
    """Be another simulated device."""
    agent_of(request).device.become(body.profile)
    return await list_profiles(request)


@router.get("/v1/policy")
async def get_policy(request: Request) -> dict[str, Any]:
    """Mode, gamma and reason of the last decision, thresholds, costs, acceptance, and the last decisions."""
    return _policy(request).snapshot()


@router.put("/v1/policy")
async def change_policy(changes: dict[str, Any], request: Request) -> dict[str, Any]:
    """Change thresholds; the others stay. Takes effect with the next round."""
    policy = _policy(request)
    policy.update_thresholds(policy.thresholds.updated(changes))
    return policy.snapshot()


def _policy(request: Request) -> PolicyEngine:
    policy = agent_of(request).engine.policy
    if not isinstance(policy, PolicyEngine):
        raise NotFoundError("this agent runs without a policy", code="no_policy")
    return policy


def _rounded(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) and math.isfinite(value) else value
