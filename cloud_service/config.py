"""The cloud service's settings: flags over environment over the preset's defaults."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from shared.errors import ConfigError

MIN_STORE_KEY_LENGTH = 16


class Preset(StrEnum):
    """The model that verifies."""

    TINY = "tiny"
    SMALL = "small"


PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    Preset.TINY: {"model": "smollm2-135m-instruct"},
    Preset.SMALL: {"model": "qwen2.5-coder-1.5b-instruct"},
}


class CloudSettings(BaseSettings):
    """Every setting of the cloud service. Times in seconds, sizes in bytes, lengths in tokens.

    Load it with `load_settings`, which turns every complaint into one `ConfigError`.
    """

    model_config = SettingsConfigDict(
        env_prefix="SOUSCHEF_", env_ignore_empty=True, extra="ignore", frozen=True, allow_inf_nan=False
    )

    preset: Preset = Field(Preset.SMALL, description="model that verifies")
    model: str = Field(min_length=1, description="its catalogue name, file:PATH or hf:ORG/REPO/FILE")
    cache_dir: Path | None = Field(None, description="where models are kept; the user cache by default")
    context_length: int = Field(2048, ge=32, le=131072, description="most tokens of a session")
    threads: int | None = Field(None, ge=1, le=256, description="inference threads; the usable cores by default")

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; beyond loopback needs an API key")
    port: int = Field(8090, ge=0, le=65535, description="0 takes a free one")
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = Field((), description="bearer keys of edge agents")
    metrics_open: bool = Field(False, description="serve /metrics without a key")
    max_body_bytes: int = Field(2 * 2**20, ge=1024, description="largest request body")
    requests_per_minute: int = Field(6000, ge=1, description="requests of one key a minute")

    max_running: int = Field(8, ge=1, le=256, description="streams side by side, and as many verifying rounds")
    max_waiting: int = Field(32, ge=0, le=4096, description="requests that may queue")
    kv_memory_bytes: int = Field(2 * 2**30, ge=2**20, description="ceiling of all caches together")
    session_ttl_s: float = Field(900.0, gt=0, le=86400, description="time an idle session is kept")
    max_sessions: int = Field(4096, ge=1, description="sessions kept")
    max_gamma: int = Field(8, ge=0, le=16, description="longest draft asked for")
    grace_s: float = Field(30.0, ge=0, le=3600, description="time that running streams get at a stop")
    fleet_ttl_s: float = Field(300.0, gt=0, le=86400, description="time a silent device stays in /v1/fleet")
    max_devices: int = Field(4096, ge=0, le=65536, description="devices kept for one key")

    redis_url: SecretStr | None = Field(None, description="shared session store, redis:// or rediss://")
    redis_timeout_s: float = Field(0.25, gt=0, le=30, description="longest wait for the store")
    store_key: SecretStr | None = Field(
        None, description="secret that encrypts token ids in the store; without one no ids are kept there"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: dict[str, Any]) -> dict[str, Any]:
        preset = values.get("preset", Preset.SMALL)
        return {**PRESETS.get(preset, PRESETS[Preset.SMALL]), **values}

    @field_validator("api_keys", mode="before")
    @classmethod
    def _split_words(cls, value: object) -> object:
        return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _demand_keys(self) -> Self:
        keys: Iterable[SecretStr] = self.api_keys
        if not all(key.get_secret_value().strip() for key in keys):
            raise ValueError("an API key must not be empty")
        if not self.api_keys and not _is_loopback(self.host):
            raise ValueError(f"host {self.host} can be reached by others: set an API key (--api-key or api_keys)")
        if self.store_key and len(self.store_key.get_secret_value()) < MIN_STORE_KEY_LENGTH:
            raise ValueError(f"store_key needs at least {MIN_STORE_KEY_LENGTH} characters")
        return self


def load_settings(flags: Mapping[str, Any] | None = None) -> CloudSettings:
    """The settings of this process. A flag that is None or empty was not given.

    Raises:
        ConfigError: one line that names the setting and what is allowed.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None and value not in ((), [])}
    try:
        return CloudSettings(**given)
    except ValidationError as error:
        # The value is left out: it may be a key.
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"setting {name}: {message}" if name else message) from None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
