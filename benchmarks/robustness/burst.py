"""Does a server recover from a burst? The scheduler alone, with a model of time.

Requests come at random times, `--burst` times as many from second 60 to 75. Some are questions
about a few documents, which the document cache should hold. With `--keys` they are of several,
which share the memory. A line every 30 s of simulated time says how long first tokens took, how
much the cache holds, and how many requests were refused.

    python benchmarks/robustness/burst.py --rate 11 --most-reading 8
    python benchmarks/robustness/burst.py --rate 11 --most-reading 100000

With 100000, documents always give way.
"""

from __future__ import annotations

import argparse
from random import Random

from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Budget, FilterPlan
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.memory import MemoryPool
from gemserve.engine.scheduling import admission
from gemserve.engine.scheduling import scheduler as scheduling
from gemserve.engine.scheduling.time_shares import Portion
from gemserve.engine.sequence.sequence import LiveSequence
from gemserve.engine.sequence.step_plan import Chunk, Kept, StepOutput

LAYERS, UNIT_BYTES, KV_BYTES = 8, 512, 768 << 20  # the built-in model's
MAX_QUEUE, MAX_RUNNING, CHUNK_TOKENS, KEEP = 128, 256, 2048, 1024
LONG = [[100 + i] * 31_800 for i in range(8)]
BURST_S = 60.0, 75.0
REPORT_S = 30.0


def draw(rng: Random, order: int, options: argparse.Namespace) -> LiveSequence:
    """12% ask about a document, 0.7% about a long one, the others have a short prompt."""
    kind = rng.random()
    documents = LONG if kind < 0.127 else None
    if kind < 0.12:
        documents = [[i] * 5900 for i in range(options.documents)]
    if documents is None:
        ids = [rng.randrange(4000) for _ in range(350)]
    else:
        ids = rng.choice(documents) + [rng.randrange(4000) for _ in range(16)]
    kept = min(KEEP, len(ids))
    request = Request(
        request_id=str(order),
        prompt_ids=ids,
        tenant=b"%d" % rng.randrange(options.keys),
        sampling=SamplingParams(max_tokens=12 if rng.random() < 0.9 else 120),
        filter=FilterParams(method="sieve", keep=KEEP),
        plan=FilterPlan(
            reason=None if documents else "short_prompt",
            num_kept=kept,
            budget=Budget(low=1, high=kept, limit=kept),
            layer=2 if documents else None,
            rows=tuple(range(len(ids) - 8, len(ids))) if documents else (),
        ),
    )
    return LiveSequence(request, order)


def chunk_s(chunk: Chunk) -> float:
    """About what the built-in model takes on one core."""
    per_token_s = 0.00005 if chunk.is_filter else 0.00016
    return chunk.count * (per_token_s + 5e-9 * (chunk.start + chunk.count / 2))


def simulate(options: argparse.Namespace) -> None:
    rng, rate, seconds = Random(options.seed), options.rate, options.seconds
    portion = Portion(8, None) if options.keys > 1 else None
    pool = MemoryPool(KV_BYTES // UNIT_BYTES)
    scheduler = scheduling.Scheduler(
        pool, num_layers=LAYERS, max_running=MAX_RUNNING, cache_units=pool.capacity // 2
    )
    arrived_s: dict[int, float] = {}
    first_s: list[float] = []
    now_s, due_s, told_s, order, refused = 0.0, rng.expovariate(rate), REPORT_S, 0, 0
    while now_s < seconds:
        while due_s <= now_s:
            if len(scheduler.waiting) < MAX_QUEUE:
                order += 1
                sequence = draw(rng, order, options)
                arrived_s[sequence.order] = due_s
                scheduler.add(sequence)
            else:
                refused += 1
            is_burst = BURST_S[0] < due_s < BURST_S[1]
            due_s += rng.expovariate(rate * (options.burst if is_burst else 1))
        if scheduler.is_idle:
            now_s = due_s
            continue
        is_decode_due = rng.random() < 0.4
        plan = scheduler.schedule(CHUNK_TOKENS, is_decode_due=is_decode_due, portion=portion)
        tokens = {row.sequence: [1] for row in plan.decodes}
        kept: dict[int, Kept] = {}
        if plan.decodes:
            now_s += 0.004 + 0.0003 * len(plan.decodes)
        if (chunk := plan.chunk) is not None:
            now_s += chunk_s(chunk)
            if chunk.is_last and chunk.is_filter:
                budget = scheduler.sequences[chunk.sequence].plan.budget
                chosen = range(budget.high)
                ids = scheduler.sequences[chunk.sequence].request.prompt_ids[: budget.high]
                kept[chunk.sequence] = Kept(positions=chosen, ids=ids)
            elif chunk.is_last:
                tokens[chunk.sequence] = [1]
                first_s.append(now_s - arrived_s.pop(chunk.sequence))
        drawn = {number: scheduler.sequences[number] for number in tokens}
        finished = frozenset(
            number
            for number, sequence in drawn.items()
            if len(sequence.generated) + 1 >= sequence.request.sampling.max_tokens
        )
        scheduler.commit(
            plan, StepOutput(is_chunk_done=True, tokens=tokens, kept=kept, finished=finished)
        )
        if now_s >= told_s:
            told_s += REPORT_S
            mean_s = sum(first_s) / max(1, len(first_s))
            share = scheduler.cache.used / pool.capacity
            print(
                f"{now_s:4.0f} s: waiting {len(scheduler.waiting):3}, running "
                f"{len(scheduler.running):3}, cache {share:.2f} of the memory, TTFT {mean_s:5.2f} "
                f"s of {len(first_s)}, refused {refused}",
                flush=True,
            )
            first_s.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rate", type=float, default=11.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=600.0, help="to simulate")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--burst", type=float, default=4.0, help="times the rate")
    parser.add_argument("--keys", type=int, default=1)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--most-reading", type=int, default=admission.MOST_READING)
    arguments = parser.parse_args()
    admission.MOST_READING = arguments.most_reading
    simulate(arguments)


if __name__ == "__main__":
    main()
