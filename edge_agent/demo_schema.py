"""What the demo page may ask for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from edge_agent.openai_schema import ChatRequest
from edge_agent.request_fields import Text

NUM_TOP_LOGPROBS = 5


class DemoRequest(BaseModel):
    """One prompt, answered by a race or by a single run. temperature 0 is greedy."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    prompt: Annotated[Text, Field(min_length=1, max_length=20_000)]
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 64
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    speculation: Literal["auto", "on"] = "auto"
    privacy: Literal["standard", "on_device"] = "standard"
    prediction: Annotated[Text, Field(max_length=20_000)] | None = None

    def chat_request(self, **souschef: Any) -> ChatRequest:
        """The same as an ordinary chat request. souschef: more of our own fields."""
        return ChatRequest.model_validate(
            {
                "messages": [{"role": "user", "content": self.prompt}],
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "seed": self.seed,
                "logprobs": True,
                "top_logprobs": NUM_TOP_LOGPROBS,
                "prediction": {"type": "content", "content": self.prediction} if self.prediction else None,
                "souschef": {"speculation": self.speculation, "privacy": self.privacy} | souschef,
            }
        )
