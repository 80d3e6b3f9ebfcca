"""What the demo page knows of the agent: facts at its start, then the state as it changes."""

from __future__ import annotations

import dataclasses
from typing import Any

from edge_agent.agent import Agent
from edge_agent.decision import Mode
from edge_agent.policy_controller import PolicyEngine
from edge_agent.scenarios import Scenario, built_in
from shared.cpus import usable_cpus

RECENT_DECISIONS = 8
TIMELESS_DECISION = ("request_id", "round", "mode", "gamma", "reason")


def demo_facts(agent: Agent) -> dict[str, Any]:
    """The models, the machine, the scenarios, and the cost curve as measured so far (milliseconds)."""
    engine, settings = agent.engine, agent.settings
    policy = engine.policy if isinstance(engine.policy, PolicyEngine) else None
    return {
        "model": engine.model_name,
        "draft": engine.draft.name if engine.draft else None,
        "context_length": engine.context_length,
        "rule": settings.acceptance_rule.value,
        "max_gamma": settings.max_gamma,
        "threads": settings.threads or usable_cpus(),
        "sensors": settings.sensors,
        "has_cloud": settings.cloud_url is not None,
        "verify_ms": [round(value * 1e3, 3) for value in policy.costs.curve.values] if policy else None,
        "draft_token_ms": {name: round(cost * 1e3, 4) for name, cost in policy.costs.draft_costs.items()}
        if policy
        else {},
        "energy_source": policy.energy.source if policy else None,
        "modes": [mode.value for mode in Mode],
        "scenarios": [_scenario(scenario) for scenario in built_in()],
    }


def demo_state(agent: Agent) -> dict[str, Any]:
    """The device, the link, the queue and the last decisions. Equal as long as nothing has changed."""
    state: dict[str, Any] = {
        "running": agent.scheduler.num_running,
        "waiting": agent.scheduler.num_waiting,
        "device": None,
        "link": None,
        "policy": None,
    }
    policy = agent.engine.policy
    if isinstance(policy, PolicyEngine):
        device, link = policy.senses.device(), policy.senses.link()
        readings = dataclasses.asdict(device)
        age = readings.pop("age_s")
        state["device"] = {
            name: round(value, 2) if isinstance(value, float) else value for name, value in readings.items()
        } | {"fresh": age is not None}
        state["link"] = {"configured": link.configured, "healthy": link.healthy, "rtt_ms": _ms(link.rtt_s)}
        snapshot = policy.snapshot()
        state["policy"] = {
            **{name: snapshot[name] for name in ("mode", "gamma", "reason", "heat_rung", "battery_rung")},
            "acceptance": snapshot["acceptance"],
            "decisions": [
                {name: decision[name] for name in TIMELESS_DECISION}
                for decision in snapshot["decisions"][-RECENT_DECISIONS:]
            ],
        }
    return state


def _scenario(scenario: Scenario) -> dict[str, Any]:
    return {
        "category": scenario.category,
        "text": scenario.text,
        "prediction": scenario.prediction,
        "on_device": scenario.on_device,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)
