"""What a server does with more requests than it can answer, and with a greedy client beside others.

Requests come at random times, at 1, 2 and 5 times the capacity that is measured first, whatever the
server does. An answer is good if it is right and its first token comes within `--ttft-bound`
seconds, or all of it if it is not streamed. As for the capacity, only those count that end before
the last request is sent: with what the queue holds then it would seem more than there can be.

What is refused must be refused at once, with `Retry-After`. After each load single requests show
how long it takes until the server answers as when it is idle. What refusals said of when it would
be done is compared with when all was answered that was sent before each.

Then two clients with keys of their own: the polite one sends a fifth of the capacity, alone and
beside a greedy one that sends five times the capacity.

    python benchmarks/robustness/overload.py --server-core 0 --client-core 1 --out overload
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import httpx

from benchmarks.robustness import soak
from benchmarks.robustness.load_server import LoadServer, write_adapters
from benchmarks.robustness.mix import Mix
from benchmarks.robustness.mixed_client import Call, MixedClient, Outcome
from benchmarks.robustness.open_loop import Pick, Run, Sender, record
from benchmarks.robustness.soak_report import percentile
from gemserve_client.load_test import result_line

WEIGHTS = {"chat": 18.0, "document": 8.0, "adapter": 4.0, "schema": 2.0, "long": 0.1}
POLITE, GREEDY = "bob", "alice"
POLITE_SHARE, GREEDY_SHARE = 0.2, 5.0
NORMAL = 2.0  # a lone request is answered as usual up to this many times the usual TTFT
RECOVERY_S = 120.0
MOST_OPEN = 900
LAST_REFUSALS_S = 3.0
RIGHT_WITHIN = 0.7, 1.3


class Overload:
    """One server and the clients that load it."""

    def __init__(
        self, server: LoadServer, mix: Mix, watcher: httpx.AsyncClient, options: argparse.Namespace
    ) -> None:
        self._server, self._mix, self._watcher = server, mix, watcher
        self._options = options
        self._client = MixedClient(server, connections=MOST_OPEN)
        self._sender = Sender(self._client, most_open=MOST_OPEN)
        self._seed = options.seed
        self.capacity = 0.0
        self._lone_ttft_s = 0.0

    async def run(self) -> list[dict[str, Any]]:
        """Measure everything, and return a row for each load."""
        if self._options.any_answer:
            print("warming up", file=sys.stderr)
            await self._closed_loop()
        else:
            print("recording answers", file=sys.stderr)
            await record(self._client, self._mix)
        await self._measure_lone()
        await self._measure_capacity()
        rows = []
        for times in self._options.times:
            print(f"{times:g} times the capacity", file=sys.stderr)
            rows.append(await self._row(f"{times:g} × capacity", [(times, None)]))
        polite, greedy = (POLITE_SHARE, POLITE), (GREEDY_SHARE, GREEDY)
        print("a polite client alone, then beside a greedy one", file=sys.stderr)
        rows.append(await self._row("polite alone", [polite]))
        rows.append(await self._row("polite beside greedy", [polite, greedy]))
        await self._client.close()
        return rows

    async def _measure_lone(self) -> None:
        call = self._mix.calls["chat"][1]
        outcomes = [await self._client.send(call, 0.0) for _ in range(20)]
        self._lone_ttft_s = percentile([o.ttft_s for o in outcomes if o.ttft_s], 50) or 0.0

    async def _measure_capacity(self) -> None:
        print("measuring the capacity", file=sys.stderr)
        run = await self._closed_loop()
        self.capacity = run.count("right") / run.seconds

    async def _closed_loop(self) -> Run:
        return await self._sender.closed_loop(
            self._picker(None),
            at_once=soak.CAPACITY_AT_ONCE,
            seconds=self._options.seconds,
            seed=self._seed,
        )

    def _picker(self, tenant: str | None) -> Pick:
        """Draws calls by `WEIGHTS`; with `tenant` all of them have its key."""
        kinds = {kind: calls for kind, calls in self._mix.calls.items() if kind in WEIGHTS}

        def pick(rng: Random) -> Call:
            (kind,) = rng.choices(list(kinds), [WEIGHTS[kind] for kind in kinds])
            call = rng.choice(kinds[kind])
            return call if tenant is None else replace(call, tenant=tenant)

        return pick

    async def _row(self, name: str, loads: Sequence[tuple[float, str | None]]) -> dict[str, Any]:
        """Run all loads at once; the row is about the first one."""
        self._seed += 1
        memory: list[int] = []
        watching = asyncio.create_task(self._watch_memory(memory))
        sending = [
            asyncio.create_task(
                self._sender.open_loop(
                    self._picker(tenant),
                    rate=times * self.capacity,
                    seconds=self._options.seconds,
                    seed=self._seed * 10 + index,
                )
            )
            for index, (times, tenant) in enumerate(loads)
        ]
        began_s = time.perf_counter()
        await asyncio.sleep(self._options.seconds)
        recovery_s = await self._recover()
        runs = [await task for task in sending]
        drained_s = time.perf_counter() - began_s - self._options.seconds
        watching.cancel()
        await asyncio.wait([watching])
        row = {"load": name, "rate": loads[0][0] * self.capacity}
        row |= self._figures(runs[0]) | {"recovery_s": recovery_s, "drained_s": drained_s}
        row["retry_after_ratios"] = retry_after_ratios(runs[0].outcomes)
        row["retry_after_ratios_to_the_end"] = retry_after_ratios(
            runs[0].outcomes, self._options.seconds - LAST_REFUSALS_S, with_later=True
        )
        row |= {"rss_most_bytes": max(memory), "rss_end_bytes": memory[-1]}
        if len(runs) > 1:
            row["greedy"] = self._figures(runs[1])
        return row

    def _figures(self, run: Run) -> dict[str, Any]:
        bound_s, seconds = self._options.ttft_bound, self._options.seconds
        right = [o for o in run.outcomes if o.verdict == "right"]
        refused = [o for o in run.outcomes if o.verdict == "refused"]
        in_time = [o for o in right if o.due_s + o.total_s <= seconds]
        good = [o for o in in_time if (o.ttft_s or o.total_s) <= bound_s]
        late = [f"{o.name}: {o.verdict}: {o.detail}" for o in run.outcomes if _is_bad(o)]
        firsts = [o.ttft_s for o in right if o.ttft_s is not None]
        gaps = [gap for o in right for gap in o.gaps_s]
        times = [o.total_s for o in refused]
        return {
            "sent": len(run.outcomes),
            "right": len(right),
            "refused": len(refused),
            "bad": late[:20],
            "goodput_per_s": len(good) / seconds,
            "goodput_share": len(good) / seconds / self.capacity,
            **{f"ttft_p{p}_s": percentile(firsts, p) for p in (50, 99)},
            **{f"gap_p{p}_s": percentile(gaps, p) for p in (50, 99)},
            **{f"refusal_p{p}_s": percentile(times, p) for p in (50, 99)},
            "without_retry_after": sum(o.retry_after_s is None for o in refused),
            "held_back": run.held_back,
            "most_open": run.most_open,
            "pauses_s": run.pauses_s,
        }

    async def _recover(self) -> float | None:
        """Seconds until a lone request is answered as fast as when nothing else runs."""
        call = self._mix.calls["chat"][1]
        began_s = time.perf_counter()
        while (since_s := time.perf_counter() - began_s) < RECOVERY_S:
            outcome = await self._client.send(call, 0.0)
            if outcome.ttft_s is not None and outcome.ttft_s <= NORMAL * self._lone_ttft_s:
                return since_s
            await asyncio.sleep(0.05)
        return None

    async def _watch_memory(self, memory: list[int]) -> None:
        while True:
            memory.append(self._server.resident_bytes())
            await asyncio.sleep(0.5)

    def summary(self) -> dict[str, Any]:
        return {"capacity_per_s": self.capacity, "lone_ttft_s": self._lone_ttft_s}


def retry_after_ratios(
    outcomes: Sequence[Outcome], since_s: float = 0.0, *, with_later: bool = False
) -> dict[str, float | int] | None:
    """The seconds that refusals since `since_s` named, over those until their cause was gone.

    That is until all was answered that was sent before, or, `with_later`, whatever was sent: then a
    refusal's seconds seem too few by as much as is let in after it. None: nothing was refused. What
    is said is at least a second and whole, so short waits seem too long.
    """
    answered = sorted((o.due_s, o.due_s + o.total_s) for o in outcomes if o.verdict == "right")
    sent_s = [due_s for due_s, _ in answered]
    ends_s = list(accumulate((end_s for _, end_s in answered), max))
    ratios = []
    for outcome in outcomes:
        if outcome.verdict != "refused" or outcome.due_s < since_s:
            continue
        refused_s = outcome.due_s + outcome.total_s
        num_before = len(answered) if with_later else bisect_left(sent_s, refused_s)
        left_s = ends_s[num_before - 1] - refused_s if num_before else 0.0
        if outcome.retry_after_s is not None and left_s > 0:
            ratios.append(outcome.retry_after_s / max(1.0, left_s))
    if not ratios:
        return None
    near = sum(RIGHT_WITHIN[0] <= ratio <= RIGHT_WITHIN[1] for ratio in ratios)
    shares = {f"p{p}": percentile(ratios, p) or 0.0 for p in (10, 50, 90)}
    return {"refusals": len(ratios), "right": near / len(ratios), **shares}


def _is_bad(outcome: Outcome) -> bool:
    return outcome.verdict not in ("right", "refused")


def main() -> int:
    """Return 0 if nothing was wrong, failed or timed out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load (%(default)s)")
    parser.add_argument("--times", type=float, nargs="+", default=[1.0, 2.0, 5.0])
    parser.add_argument("--ttft-bound", type=float, default=5.0, help="of a good answer")
    parser.add_argument(
        "--any-answer",
        action="store_true",
        help="count answers as right that end, whatever they say, since what a model writes may "
        "depend on what is computed beside it",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths of texts")
    parser.add_argument("--without", nargs="*", choices=WEIGHTS, default=[], help="kinds of calls")
    parser.add_argument("--kv-memory", default="768MiB")
    parser.add_argument("--server-core", type=int, help="bind the server to this processor core")
    parser.add_argument("--client-core", type=int, help="bind this script to this core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", default="", help="more options of the server, as one text")
    parser.add_argument("--out", type=Path, help="folder for overload.json and overload.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [*write_adapters(folder / "adapters", options.model), *options.settings.split()]
        words += ["--kv-memory", options.kv_memory]
        mix = Mix(
            options.model,
            soak.tokenizer_of(options.model),
            options.seed,
            kinds=WEIGHTS.keys() - {*options.without},
            scale=options.scale,
        )
        server = LoadServer(folder, model=options.model, core=options.server_core, settings=words)
        with server:
            if options.client_core is not None:
                os.sched_setaffinity(0, {options.client_core})
            result = asyncio.run(_measure(server, mix, options))
            result["log_errors"] = server.errors_in_log()[:20]
    result = {"benchmark": "overload", "commit": result_line.commit(), **result}
    text = as_markdown(result, options.ttft_bound)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "overload.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / "overload.md").write_text(text)
    print(text)
    print(json.dumps(result))
    return int(any(row["bad"] for row in result["rows"]) or bool(result["log_errors"]))


async def _measure(server: LoadServer, mix: Mix, options: argparse.Namespace) -> dict[str, Any]:
    async with httpx.AsyncClient() as watcher:
        overload = Overload(server, mix, watcher, options)
        rows = await overload.run()
    return {**overload.summary(), "rows": rows}


def as_markdown(result: dict[str, Any], bound_s: float) -> str:
    """The figures for people."""
    columns = {
        "sent": "sent",
        "right": "answered",
        "refused": "refused",
        "goodput_share": "good, of capacity",
        "ttft_p50_s": "TTFT p50",
        "ttft_p99_s": "TTFT p99",
        "gap_p50_s": "gap p50",
        "gap_p99_s": "gap p99",
        "refusal_p99_s": "refusal p99",
        "recovery_s": "recovery",
    }
    lines = [
        f"Capacity {result['capacity_per_s']:.1f} requests a second; TTFT of a lone request "
        f"{result['lone_ttft_s'] * 1e3:.0f} ms; good: first token within {bound_s:g} s. Seconds.",
        "",
        f"| load | {' | '.join(columns.values())} | RSS at most, MiB |",
        "|---|" + "---|" * (len(columns) + 1),
    ]
    for row in result["rows"]:
        both = [row, *([{"load": "the greedy one", **row["greedy"]}] if "greedy" in row else [])]
        for shown in both:
            cells = [_cell(shown.get(name)) for name in columns]
            memory = f"{shown['rss_most_bytes'] / 2**20:.0f}" if "rss_most_bytes" in shown else "–"
            lines.append(f"| {shown['load']} | {' | '.join(cells)} | {memory} |")
        for name, until in (
            ("retry_after_ratios", "all that was sent before was answered"),
            ("retry_after_ratios_to_the_end", "everything was answered"),
        ):
            if (said := row.get(name)) is not None:
                lines.append(
                    f"\n- {row['load']}: {said['refusals']} refusals named {said['p50']:.2f} "
                    f"of the time until {until} (p10 {said['p10']:.2f}, "
                    f"p90 {said['p90']:.2f}; {said['right']:.0%} within 30%)"
                )
        lines += [f"\n- {row['load']}: {bad}" for bad in row["bad"][:3]]
    return "\n".join(lines) + "\n"


def _cell(value: float | int | None) -> str:
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
