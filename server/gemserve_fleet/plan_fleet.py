"""`gemserve plan --fleet`: how many replicas a load needs, by simulation."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from gemserve.accelerators import DEVICES, MEASURED_EFFICIENCY, MEMORY_SHARE, Device
from gemserve.cli import plan
from gemserve.cli.options import number, read_value
from gemserve.cli.plan import PlannedRequest
from gemserve.cli.plan_speed import SPEED_READERS
from gemserve.cli.tables import aligned
from gemserve.errors import ConfigError
from gemserve_fleet.simulator.load import OfferedLoad, arrivals

if TYPE_CHECKING:  # a plan for one prompt does without
    from gemserve_fleet.replicas.routing import Reading
    from gemserve_fleet.simulator.load import Arrival
    from gemserve_fleet.simulator.replica import ReplicaMemory
    from gemserve_fleet.simulator.request_cost import MeasuredSpeeds, RequestCost
    from gemserve_fleet.simulator.simulation import Outcome


@dataclass(frozen=True, slots=True)
class _FleetOption:
    """`default`: as it would be typed; None: what `unset` says."""

    flag: str
    default: str | None
    read: Callable[[str], Any]
    help: str
    unset: str = ""

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


def _read_replicas(text: str) -> int | None:
    return None if text == "auto" else int(number(1, 4096)(text))


_ABOVE_0 = number(0.001, kind=float)
_OPTIONS = (
    _FleetOption("--requests-per-day", "1000000", _ABOVE_0, "requests of --tokens each, per day"),
    _FleetOption(
        "--replicas", "auto", _read_replicas, "replicas; auto: as few as reach --ttft-p95"
    ),
    _FleetOption("--ttft-p95", "10", _ABOVE_0, "seconds in which 95%% get their first token"),
    _FleetOption(
        "--bandwidth-efficiency",
        str(MEASURED_EFFICIENCY),
        number(0.01, 1, float),
        "share of its peak bandwidth that decoding reaches",
    ),
    _FleetOption(
        "--cache-memory", "0.5", number(0, 1, float), "share of the KV memory for documents"
    ),
    _FleetOption(
        "--documents", "1000", number(1, 10**7), "documents that are asked about repeatedly"
    ),
    _FleetOption(
        "--zipf", "1.0", number(0, 4, float), "their popularity is their rank to minus this power"
    ),
    _FleetOption(
        "--new-share",
        "0.5",
        number(0, 1, float),
        "share of requests whose document is never seen again",
    ),
    _FleetOption(
        "--filter-tokens-per-s", None, _ABOVE_0, "measured, by the filter pass", "by FLOPs"
    ),
    _FleetOption("--decode-steps-per-s", None, _ABOVE_0, "measured", "by bytes"),
    _FleetOption("--simulated-requests", "5000", number(100, 10**6), "more are more exact"),
    _FleetOption("--seed", "0", number(0, 2**32 - 1), "of the simulated load"),
)

# what the options of `SPEED_READERS` are with --fleet, if they are not given
_SPEED_DEFAULTS = {"accelerator": "h100", "efficiency": str(MEASURED_EFFICIENCY)}


def extend(parser: argparse.ArgumentParser) -> None:
    """Add `--fleet` and its options to `gemserve plan`."""
    group = parser.add_argument_group(
        "fleet",
        "with --fleet: how many replicas a load needs, by simulation "
        "(docs/several-machines.md), of the accelerator h100 if no --accelerator is given",
    )
    group.add_argument("--fleet", action="store_true", help="plan a fleet, not one prompt")
    for option in _OPTIONS:
        default = option.default or option.unset
        group.add_argument(
            option.flag, dest=option.name, help=f"{option.help} (default: {default})"
        )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.fleet:
        return plan.run(arguments, lambda request: plan_fleet(arguments, request))
    _check_no_fleet_options(arguments)
    return plan.run(arguments)


def _check_no_fleet_options(arguments: argparse.Namespace) -> None:
    """Raise `ConfigError` if a flag of `--fleet` alone is given without it.

    A variable may be there for a server: `GEMSERVE_REPLICAS`, `GEMSERVE_CACHE_MEMORY`.
    """
    problems = [
        f"{option.name}={value}: has an effect only with --fleet"
        for option in _OPTIONS
        if (value := getattr(arguments, option.name)) is not None
        and option.name not in arguments.from_variables
    ]
    if problems:
        raise ConfigError(*problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One way to serve the load. `outcome` None: `reason` says why there is none."""

    reading: Reading
    cache: bool
    alone_s: float
    peak_bytes: int
    outcome: Outcome | None
    reason: str = ""


def plan_fleet(arguments: argparse.Namespace, request: PlannedRequest) -> dict[str, Any]:
    """Print the tables. Return what they say, for a line of JSON."""
    from gemserve_fleet.simulator.policies import POLICIES
    from gemserve_fleet.simulator.request_cost import MeasuredSpeeds
    from gemserve_fleet.simulator.simulation import simulate

    given = _read(arguments)
    device = _device(given)
    kv_bytes = _kv_bytes(request, device)
    speeds = MeasuredSpeeds(
        read=given["read_tokens_per_s"],
        filtered=given["filter_tokens_per_s"],
        decode=given["decode_steps_per_s"],
    )
    load = OfferedLoad(
        requests_per_s=given["requests_per_day"] / 86_400,
        documents=given["documents"],
        zipf=given["zipf"],
        new_share=given["new_share"],
    )
    arriving = list(arrivals(load, given["simulated_requests"], given["seed"]))
    costs = _costs(request, device, speeds)
    shares = dict.fromkeys((0.0, given["cache_memory"]))
    ways = [(reading, cost, share) for reading, cost in costs for share in shares]
    rows = [
        _row(reading, cost, _memory(kv_bytes, share), arriving, given)
        for reading, cost, share in tqdm(ways, "simulating", leave=False, disable=None)
    ]
    _print_heading(request, given, kv_bytes)
    _print_rows(rows, given["ttft_p95"])
    routers: list[Outcome] = []
    last = rows[-1]
    if last.outcome is not None and last.outcome.num_replicas > 1:
        cost = dict(costs)[last.reading]
        memory = _memory(kv_bytes, given["cache_memory"])
        routers = [
            last.outcome
            if policy == last.outcome.policy
            else simulate(
                cost,
                memory,
                arriving,
                num_replicas=last.outcome.num_replicas,
                policy=policy,
                seed=given["seed"],
            )
            for policy in POLICIES
        ]
        _print_routers(routers, last)
    return {
        **given,
        "kv_memory_bytes": kv_bytes,
        "rows": [asdict(row) for row in rows],
        "routers": [asdict(outcome) for outcome in routers],
    }


def _read(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options' values by name."""
    given: dict[str, Any] = {}
    of_fleet = [(option.name, option.default, option.read) for option in _OPTIONS]
    of_speed = [(name, _SPEED_DEFAULTS.get(name), read) for name, read in SPEED_READERS.items()]
    for name, default, read in (*of_fleet, *of_speed):
        text = getattr(arguments, name)
        text = default if text is None else text
        given[name] = None if text is None else read_value(name, text, read)
    return given


def _device(given: dict[str, Any]) -> Device:
    published = DEVICES[given["accelerator"]]
    return Device(
        peak_flops=published.peak_flops,
        peak_bandwidth=published.peak_bandwidth,
        memory_bytes=published.memory_bytes,
        efficiency=given["efficiency"],
        bandwidth_efficiency=given["bandwidth_efficiency"],
    )


def _kv_bytes(request: PlannedRequest, device: Device) -> int:
    usable = int(MEMORY_SHARE * device.memory_bytes)
    left = usable - request.weight_bytes
    kv_bytes = left if request.kv_bytes is None else request.kv_bytes
    if kv_bytes > left or left <= 0:
        raise ConfigError(
            f"kv_memory={kv_bytes}: with {request.weight_bytes} bytes of weights, more than "
            f"{usable}, the {MEMORY_SHARE:.0%} of the accelerator's memory that a replica may use"
        )
    return kv_bytes


def _memory(kv_bytes: int, cache_share: float) -> ReplicaMemory:
    from gemserve_fleet.simulator.replica import ReplicaMemory

    return ReplicaMemory(kv_bytes=kv_bytes, cache_bytes=int(cache_share * kv_bytes))


def _costs(
    request: PlannedRequest, device: Device, speeds: MeasuredSpeeds
) -> list[tuple[Reading, RequestCost]]:
    from gemserve_fleet.simulator.request_cost import request_cost

    ways: list[Reading] = ["whole", "one_pass"]
    if request.segment_size is not None and request.segment_size < request.num_tokens:
        ways.append("windows")
    return [
        (
            way,
            request_cost(
                request.shape,
                device,
                way,
                num_tokens=request.num_tokens,
                keep=request.keep,
                max_tokens=request.max_tokens,
                layer=request.layer,
                segment_size=request.segment_size,
                weight_bytes=request.weight_bytes,
                speeds=speeds,
            ),
        )
        for way in ways
    ]


def _row(
    reading: Reading,
    cost: RequestCost,
    memory: ReplicaMemory,
    arriving: Sequence[Arrival],
    given: dict[str, Any],
) -> _Row:
    from gemserve_fleet.simulator.simulation import simulate
    from gemserve_fleet.simulator.sizing import MOST_REPLICAS, smallest_fleet

    alone_s = cost.reading_s(0)
    outcome, reason = None, ""
    if cost.peak_bytes > memory.kv_bytes:
        reason = f"needs {_gib(cost.peak_bytes)} of KV memory"
    elif given["replicas"] is not None:
        outcome = simulate(
            cost, memory, arriving, num_replicas=given["replicas"], seed=given["seed"]
        )
    else:
        outcome = smallest_fleet(
            cost, memory, arriving, ttft_p95_s=given["ttft_p95"], seed=given["seed"]
        )
        reason = "" if outcome else f"no fleet of up to {MOST_REPLICAS:,} replicas is fast enough"
    return _Row(
        reading=reading,
        cache=memory.cache_bytes > 0,
        alone_s=alone_s,
        peak_bytes=cost.peak_bytes,
        outcome=outcome,
        reason=reason,
    )


def _print_heading(request: PlannedRequest, given: dict[str, Any], kv_bytes: int) -> None:
    print(
        f"{given['requests_per_day']:,.0f} requests a day of {request.num_tokens:,} tokens, "
        f"{request.keep:,} kept, answers of {request.max_tokens:,}, filter layer {request.layer} "
        f"of {request.shape.num_layers}"
    )
    print(
        f"replicas of one {given['accelerator']} each, {_gib(kv_bytes)} of KV memory; simulated: "
        f"{given['simulated_requests']:,} requests"
    )


def _print_rows(rows: Sequence[_Row], ttft_p95_s: float) -> None:
    heads = ("reading", "cache", "alone s", "replicas", *_HEADS)
    lines = [
        (
            row.reading.replace("_", " "),
            "on" if row.cache else "off",
            _seconds(row.alone_s),
            "–" if row.outcome is None else f"{row.outcome.num_replicas:,}",
            *_cells(row.outcome),
        )
        for row in rows
    ]
    print(*aligned([heads, *lines], left=(0, 1)), sep="\n")
    for row in dict.fromkeys((row.reading, row.alone_s, row.reason) for row in rows if row.reason):
        reading, alone_s, reason = row
        late = f"; {_seconds(alone_s)} s alone" if alone_s > ttft_p95_s else ""
        print(f"{reading.replace('_', ' ')}: {reason}{late}")


def _print_routers(routers: Sequence[Outcome], row: _Row) -> None:
    print(f"\n{routers[0].num_replicas:,} replicas, {row.reading.replace('_', ' ')}, by routing")
    lines = [(outcome.policy, *_cells(outcome)) for outcome in routers]
    print(*aligned([("routing", *_HEADS), *lines], left=(0,)), sep="\n")


_HEADS = (
    "hits",
    "TTFT p50 s",
    "p95",
    "p99",
    "answer p95 s",
    "requests/s",
    "reading",
    "decoding",
)


def _cells(outcome: Outcome | None) -> tuple[str, ...]:
    if outcome is None:
        return ("–",) * len(_HEADS)
    return (
        f"{outcome.hit_rate:.2f}",
        _seconds(outcome.ttft_p50_s),
        _seconds(outcome.ttft_p95_s),
        _seconds(outcome.ttft_p99_s),
        _seconds(outcome.answer_p95_s),
        f"{outcome.requests_per_s:.3g}",
        f"{outcome.reading_share:.2f}",
        f"{outcome.decoding_share:.2f}",
    )


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
