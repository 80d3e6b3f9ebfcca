"""The edge agent's settings: flags over environment over file over the preset's defaults."""

from __future__ import annotations

import difflib
import ipaddress
import os
import tomllib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from shared.errors import ConfigError
from shared.sampling import AcceptanceRule

ENV_PREFIX = "SOUSCHEF_"
DEFAULT_FILE = Path("souschef.toml")
NO_DRAFT = "none"
NO_HEAD, AUTO_HEAD = "none", "auto"


class Preset(StrEnum):
    """A target, and what drafts for it beside look-ups and a shipped head."""

    TINY = "tiny"
    SMALL = "small"
    LAPTOP = "laptop"


class Objective(StrEnum):
    """What the policy trades for what."""

    LATENCY = "latency"
    ENERGY = "energy"
    BALANCED = "balanced"


PRESETS: Mapping[Preset, Mapping[str, Any]] = {
    Preset.TINY: {"target": "smollm2-135m-instruct", "draft": NO_DRAFT},
    Preset.SMALL: {"target": "qwen2.5-coder-0.5b-instruct", "draft": NO_DRAFT},
    Preset.LAPTOP: {"target": "qwen2.5-coder-1.5b-instruct", "draft": NO_DRAFT},
}

Words = Annotated[tuple[str, ...], NoDecode]
"""A list in the file, words parted by commas in the environment."""


class EdgeSettings(BaseSettings):
    """Every setting of the edge agent. Times in seconds, sizes in bytes, lengths in tokens.

    Load it with `load_settings`, which turns every complaint into one `ConfigError`.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, allow_inf_nan=False, env_ignore_empty=True
    )

    config: Path | None = Field(None, description="TOML file; souschef.toml in the working directory if it is there")
    preset: Preset = Field(Preset.SMALL, description="pair of models")

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; beyond loopback needs an API key")
    port: int = Field(8080, ge=0, le=65535, description="0 takes a free one")
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = Field((), description="bearer keys of callers")
    admin_key: SecretStr | None = Field(None, description="bearer key that may change policy and device")
    allowed_hosts: Words = Field((), description="names beside loopback's that a Host header may hold; '*' for any")
    cors_origins: Words = Field((), description="web origins whose pages may call the API")
    metrics_open: bool = Field(False, description="serve /metrics without a key")
    max_body_bytes: int = Field(2 * 2**20, ge=1024, description="largest request body")

    target: str = Field(min_length=1, description="model that answers: catalogue name, file:PATH or hf:ORG/REPO/FILE")
    draft: str = Field(min_length=1, description="model that drafts, or 'none'")
    head: str = Field(AUTO_HEAD, min_length=1, description="draft head: auto (the shipped one), none, or a directory")
    cache_dir: Path | None = Field(None, description="where models are kept; the user cache by default")
    context_length: int = Field(2048, ge=32, le=131072, description="prompt and answer together")
    threads: int | None = Field(None, ge=1, le=256, description="inference threads; the usable cores by default")
    acceptance_rule: AcceptanceRule = Field(AcceptanceRule.COUPLED, description="how drafts are judged")
    max_gamma: int = Field(16, ge=0, le=16, description="most draft tokens a round")
    answer_pool: int = Field(
        16_384, ge=0, le=2**20, description="tokens of past answers kept of each API key to draft from; 0 for none"
    )

    max_running: int = Field(4, ge=1, le=64, description="requests answered side by side")
    max_waiting: int = Field(32, ge=0, le=4096, description="requests that may queue")
    grace_s: float = Field(30.0, ge=0, le=3600, description="time that running answers get at a stop")
    ping_s: float = Field(15.0, gt=0, le=300, description="silence on a stream before a comment is sent")
    stall_s: float = Field(60.0, gt=0, le=3600, description="time a client may take nothing before it is given up")

    cloud_url: str | None = Field(None, description="cloud verifier to hand over to")
    cloud_api_key: SecretStr | None = Field(None, description="bearer key for it")
    cloud_ca_file: Path | None = Field(None, description="certificate authority to trust for it, besides the system's")
    fleet: bool = Field(False, description="report to cloud_url how the device fares; nothing of what must stay on it")
    fleet_every_s: float = Field(60.0, gt=0, le=3600, description="time between two such reports")
    sensors: str = Field("auto", min_length=1, description="auto, push, simulated:PROFILE or replay:FILE")
    policy: str = Field("auto", min_length=1, description="auto, phone, board or server")
    objective: Objective | None = Field(None, description="what the policy minimises; the policy's own by default")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, environment, file: the earlier wins."""
        return init_settings, env_settings, _TomlFile(settings_cls)

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, values: dict[str, Any]) -> dict[str, Any]:
        preset = values.get("preset", Preset.SMALL)
        return {**PRESETS.get(preset, PRESETS[Preset.SMALL]), **values}

    @field_validator("api_keys", "allowed_hosts", "cors_origins", mode="before")
    @classmethod
    def _split_words(cls, value: object) -> object:
        return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value

    @field_validator("api_keys", "admin_key")
    @classmethod
    def _refuse_empty_keys(cls, value: Any, info: ValidationInfo) -> Any:
        keys: Iterable[SecretStr] = value if isinstance(value, tuple) else [] if value is None else [value]
        if not all(key.get_secret_value().strip() for key in keys):
            raise ValueError("a key must not be empty")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _refuse_any_origin(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not origin.startswith(("http://", "https://")) or origin.endswith("/"):
                raise ValueError("origins look like https://app.example, with no slash at the end")
        return value

    @model_validator(mode="after")
    def _demand_key_beyond_loopback(self) -> Self:
        if not self.api_keys and not is_loopback(self.host):
            raise ValueError(f"host {self.host} can be reached by others: set an API key (--api-key or api_keys)")
        return self

    @model_validator(mode="after")
    def _demand_cloud_for_fleet(self) -> Self:
        if self.fleet and self.cloud_url is None:
            raise ValueError("fleet reports go to a cloud verifier: set cloud_url (--cloud-url)")
        return self

    @property
    def has_draft(self) -> bool:
        """Whether a draft model is loaded beside the target."""
        return self.draft != NO_DRAFT


class _TomlFile(PydanticBaseSettingsSource):
    """The file that flags or environment name, else souschef.toml where there is one."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError("the file is read whole")

    def __call__(self) -> dict[str, Any]:
        named = self.current_state.get("config")
        if named is None and not DEFAULT_FILE.is_file():
            return {}
        path = Path(named or DEFAULT_FILE)
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"settings file {path}: {error.strerror or error}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"settings file {path} is not valid TOML: {error}") from error


def load_settings(flags: Mapping[str, Any] | None = None) -> EdgeSettings:
    """The settings of this process. A flag that is None or empty was not given.

    Raises:
        ConfigError: one line that names the setting and what is allowed.
    """
    _refuse_unknown_variables(os.environ)
    given = {name: value for name, value in (flags or {}).items() if value is not None and value not in ((), [])}
    try:
        return EdgeSettings(**given)
    except ValidationError as error:
        raise ConfigError(_complaint(error)) from None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. A name other than localhost may mean any address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    for variable in environ:
        if variable.upper().startswith(ENV_PREFIX):
            name = variable.upper().removeprefix(ENV_PREFIX).lower()
            if name not in EdgeSettings.model_fields:
                raise ConfigError(f"environment variable {variable} is no setting{_suggestion(name, ENV_PREFIX)}")


def _complaint(error: ValidationError) -> str:
    """The first complaint in one line. The value is left out: it may be a key."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"{name} is no setting{_suggestion(name)}"
    message = first["msg"].removeprefix("Value error, ")
    return f"setting {name}: {message}" if name else message


def _suggestion(name: str, prefix: str = "") -> str:
    close = difflib.get_close_matches(name, EdgeSettings.model_fields, n=1, cutoff=0.5)
    return f"; did you mean {prefix}{close[0].upper() if prefix else close[0]}?" if close else ""
