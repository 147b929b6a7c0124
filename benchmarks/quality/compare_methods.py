"""Do the filter methods keep what full attention keeps? Pools what `gemserve eval` has left.

Each folder is an `--out` of `gemserve eval`. Over retrieval subtasks alone (needles, not tracking
or counting): every method against `none`, and sieve against every other.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from pathlib import Path

from gemserve.json_lines import parse_objects
from gemserve_lab.compare import compare, judge_fallback
from gemserve_lab.run import Outcome, average

RETRIEVAL = (
    *("single", "multikey", "multivalue", "multiquery"),
    *("niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--keep", type=float, default=0.0625, help="default: %(default)s")
    arguments = parser.parse_args()
    names = {field.name for field in fields(Outcome)}
    outcomes: list[Outcome] = []
    runs: dict[str, dict[str, object]] = {}
    for folder in arguments.folders:
        for _, entry in parse_objects((folder / "outcomes.jsonl").read_bytes()):
            if not names <= set(entry):
                continue  # of an older version
            made = Outcome(**{name: entry[name] for name in names})
            if made.keep == arguments.keep:
                outcomes.append(made)
                run = entry["run"]
                if runs.setdefault(run["task"], run) != run:
                    raise SystemExit(f"{folder}: outcomes of two runs of {run['task']}; keep one")
    found = [o for o in outcomes if o.subtask in RETRIEVAL]
    methods = list(dict.fromkeys(o.method for o in found))
    pairs = [(m, "none") for m in methods if m != "none"]
    pairs += [("sieve", m) for m in methods if m not in ("none", "sieve")]
    comparisons = [compare(found, method, other) for method, other in pairs]
    for c in comparisons:
        print(
            f"{c.method} − {c.other}: {c.difference:+.4f} (95% {c.low:+.4f} to {c.high:+.4f}, n = "
            f"{c.n}); worst {c.worst:+.3f}, {c.worst_cell[0]} at {c.worst_cell[1]}"
        )
    verdict = judge_fallback(outcomes, "sieve")
    print(
        f"fallback: fired on {verdict.needed_fired} of {verdict.needed} needed, on "
        f"{verdict.idle_fired} of {verdict.idle} that sieve gets"
    )
    rows = [row.as_json() for row in average(outcomes)]
    print(
        json.dumps(
            {
                "comparisons": [asdict(c) for c in comparisons],
                "fallback": asdict(verdict),
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
