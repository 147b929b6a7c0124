"""Do ordinary Python types come back as such: as an answer's schema, and as a call's arguments?

Each type is a field of a pydantic model. Its schema goes through the HTTP interface as
`response_format` and as the parameters of a forced call; the answer must parse and validate. An
answer that `max_tokens` cuts counts as cut, not as wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import httpx
from pydantic import (
    UUID4,
    AnyUrl,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    Json,
    PositiveInt,
    ValidationError,
    create_model,
)
from typing_extensions import TypedDict

from benchmarks.shared import results
from gemserve.api.app import create_app
from gemserve.api.serving import build_serving
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.engine.build import build_core

AT_ONCE = 8


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Place(BaseModel):
    """Where something is."""

    name: str = Field(max_length=40)
    is_near: bool = True


class Visit(BaseModel):
    place: Place
    guests: list[Place] = Field(default_factory=list, max_length=2)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    is_loud: bool


class Branch(BaseModel):
    label: str = Field(max_length=20)
    children: list[Branch] = Field(default_factory=list, max_length=2)


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    count: int


class Point(NamedTuple):
    x: int
    y: int


class Options(TypedDict):
    verbose: bool


TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "Literal": Literal["a", 2],
    "Enum": Colour,
    "Optional": int | None,
    "list": list[int],
    "set": set[int],
    "tuple": tuple[int, bool],
    "tuple of any length": tuple[int, ...],
    "dict": dict[str, int],
    "nested model": Visit,
    "closed model": Closed,
    "list of models": Annotated[list[Place], Field(max_length=3)],
    "date": date,
    "datetime": datetime,
    "time": time,
    "timedelta": timedelta,
    "UUID4": UUID4,
    "Path": Path,
    "bytes": bytes,
    "Decimal": Decimal,
    "bounded int": Annotated[int, Field(gt=3, lt=300, multiple_of=5)],
    "bounded str": Annotated[str, Field(min_length=2, max_length=12)],
    "pattern": Annotated[str, Field(pattern=r"^[a-z]{2,8}@[a-z]{2,8}\.(com|org)$")],
    "union": int | bool | Place,
    "discriminated union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "recursive model": Branch,
    "PositiveInt": PositiveInt,
    "HttpUrl": HttpUrl,
    "AnyUrl": AnyUrl,
    "NamedTuple": Point,
    "TypedDict": Options,
    "dict by pattern": dict[Annotated[str, Field(pattern="^[a-z]{3}$")], bool],
    "Json": Json[Any],
}
SMOKE = ("bool", "set", "Decimal", "UUID4")
ENDS = ("good", "cut", "wrong", "refused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--types", help="a comma-separated choice of the types")
    parser.add_argument("--smoke", action="store_true", help="a few types, the built-in model")
    results.add_row_options(parser)
    arguments = parser.parse_args()
    names = list(TYPES) if arguments.types is None else arguments.types.split(",")
    if arguments.smoke:
        arguments.model, arguments.seeds, names = "builtin", 1, list(SMOKE)
    rows = asyncio.run(measure(arguments, names))
    results.finish("schema types", arguments.device, rows, arguments.json)


async def measure(arguments: argparse.Namespace, names: Sequence[str]) -> results.Rows:
    core = build_core(
        ModelConfig(model=arguments.model, device=arguments.device),
        EngineConfig(kv_memory_bytes=512 << 20),
    )
    serving = build_serving(core, model_name="served", config=ServerConfig())
    transport = httpx.ASGITransport(create_app(serving))
    rows = results.Rows(arguments)
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=600
        ) as client:
            limit = asyncio.Semaphore(AT_ONCE)
            for name in names:
                if rows.left_s <= 0:
                    rows.put({"type": name}, {"reason": results.OUT_OF_TIME})
                    continue
                results.note(name)
                rows.put({"type": name}, await one_type(client, limit, name, arguments))
    finally:
        serving.engine.stop()
    return rows


async def one_type(
    client: httpx.AsyncClient, limit: asyncio.Semaphore, name: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    model = create_model("Answer", value=(TYPES[name], ...))
    asked = [
        (form, body_for(form, name, model, seed, arguments))
        for seed in range(arguments.seeds)
        for form in ("format", "call")
    ]

    async def ask(body: dict[str, Any]) -> tuple[str, str]:
        async with limit:
            reply = await client.post("/v1/chat/completions", json=body)
            return judge(reply, model)

    judged = await asyncio.gather(*(ask(body) for _, body in asked))
    row: dict[str, Any] = {}
    for form in ("format", "call"):
        ends = Counter(end for (f, _), (end, _) in zip(asked, judged, strict=True) if f == form)
        row |= {f"{form}_{end}": ends[end] for end in ENDS}
    faults = [why for end, why in judged if end not in ("good", "cut")]
    return {**row, "first_fault": faults[0][:120] if faults else ""}


def body_for(
    form: str, name: str, model: type[BaseModel], seed: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    schema = model.model_json_schema()
    body: dict[str, Any] = {
        "model": "served",
        "messages": [{"role": "user", "content": f"Give an example of this: {name}."}],
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "seed": seed,
    }
    if form == "format":
        wanted = {"name": "answer", "schema": schema}
        return {**body, "response_format": {"type": "json_schema", "json_schema": wanted}}
    tool = {"type": "function", "function": {"name": "give", "parameters": schema}}
    return {**body, "tools": [tool], "tool_choice": "required"}


def judge(reply: httpx.Response, model: type[BaseModel]) -> tuple[str, str]:
    """How the answer ended, and what is wrong with it."""
    if reply.status_code != 200:
        return "refused", reply.json()["error"]["message"]
    choice = reply.json()["choices"][0]
    message = choice["message"]
    calls = message.get("tool_calls")
    text = calls[0]["function"]["arguments"] if calls else message["content"]
    if choice["finish_reason"] == "length":
        return "cut", text
    try:
        model.model_validate_json(text)
    except ValidationError as error:
        return "wrong", f"{text}: {error.errors()[0]['msg']}"
    return "good", text


if __name__ == "__main__":
    main()
