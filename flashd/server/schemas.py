"""Request bodies of the OpenAI-compatible API.

Nothing is accepted and ignored: a field that isn't here is refused by name, unless its value asks
for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from flashd.runtime.sampling import SamplingParams


def _whole_text(value: str) -> str:
    """Refuse half a surrogate pair: JSON can say it, no text encoding can."""
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise ValueError(f"half a surrogate pair at character {exc.start}") from exc
    return value


Text = Annotated[str, AfterValidator(_whole_text)]
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_SEED = (1 << 63) - 1


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


# Values of OpenAI's other parameters that ask for nothing; clients send them by habit. ``None`` is
# neutral for every parameter.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "metadata": ({},),
    "min_p": (0,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "repeat_penalty": (1,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}


class _Generation(BaseModel):
    """What both kinds of completion share."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: Any) -> Any:
        """Take out parameters that aren't supported but ask for nothing either."""
        if not isinstance(body, dict):
            return body
        return {
            key: value
            for key, value in body.items()
            if key in cls.model_fields or not (value is None or value in _NEUTRAL.get(key, ()))
        }

    model: str | None = Field(None, description="Id from /v1/models; may be left out.")
    max_tokens: int | None = Field(None, ge=1, description="Tokens to generate at most.")
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy. Default 1.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus mass. Default 1.")
    top_k: int | None = Field(None, ge=0, description="Candidates kept; 0 is off. Default 0.")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="Same seed, same text.")
    stop: Text | list[Text] | None = Field(
        None, description="Up to four strings that end the answer and are not part of it."
    )
    n: Literal[1] | None = Field(None, description="Only 1.")
    user: str | None = Field(None, max_length=256, description="Free label; not stored.")
    stream: bool | None = Field(None, description="Server-sent events.")
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = Field(None, description="Go on after end-of-sequence tokens.")
    return_tokens: bool | None = Field(None, description="Token ids in choices[].tokens.")

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"{len(stops)} stop strings, expected at most {MAX_STOPS}")
        if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARS} characters")
        return value

    def sampling(self, default_max_tokens: int | None) -> SamplingParams:
        """The engine's view of this request."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=self.limit() or default_max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=self.seed,
            stop=stop,
            ignore_eos=bool(self.ignore_eos),
        )

    def limit(self) -> int | None:
        """The request's own bound on generated tokens."""
        return self.max_tokens


class CompletionRequest(_Generation):
    """``POST /v1/completions``."""

    prompt: Text | list[int] | list[Text] | list[list[int]] = Field(
        description="One text, or one list of token ids (each may be wrapped in a list of one)."
    )

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        if isinstance(value, list) and value and not isinstance(value[0], int):
            if len(value) != 1:
                raise ValueError(f"{len(value)} prompts in one request; send one request for each")
            return value[0]
        return value


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: Text


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "user", "assistant", "developer"]
    content: Text | list[TextPart]
    name: Text | None = None

    def plain(self) -> dict[str, str]:
        """What a chat template understands."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content, **({"name": self.name} if self.name else {})}


class ChatRequest(_Generation):
    """``POST /v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="Newer name of max_tokens.")

    def limit(self) -> int | None:
        """The request's own bound on generated tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
