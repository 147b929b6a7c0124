"""How many cases a fuzz test runs, what each may cost, and bytes and JSON that were changed.

`make test` runs a few cases, always the same ones. `make fuzz` sets GEMSERVE_FUZZ_EXAMPLES, and
each run of a test then has that many new ones.
"""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

MANY = int(os.environ.get("GEMSERVE_FUZZ_EXAMPLES", "0"))
COUNTS: Counter[str] = Counter()  # cases by test
MIB = 1 << 20


def cases(few: int, many_times: float = 1.0, **options: Any) -> settings:
    """Settings of a test: `few` cases, or as many random ones as wanted, times `many_times`."""
    return settings(
        max_examples=max(1, int(MANY * many_times)) if MANY else few,
        derandomize=not MANY,
        deadline=None,  # a busy machine is no bug: `bounded` counts processor time
        suppress_health_check=list(HealthCheck),
        print_blob=bool(MANY),
        **options,
    )


@contextmanager
def bounded(name: str, cpu_s: float, grown_bytes: int | None = None) -> Iterator[None]:
    """One case of test `name`, which may take so much processor time and additional memory.

    Without a name it is a part of a case that is counted elsewhere.
    """
    if name:
        COUNTS[name] += 1
    before_s, before_bytes = time.process_time(), _peak_bytes()
    yield
    taken_s, grown = time.process_time() - before_s, _peak_bytes() - before_bytes
    assert taken_s <= cpu_s, f"took {taken_s:.1f} s of processor time, the limit is {cpu_s}"
    if grown_bytes is not None:
        assert grown <= grown_bytes, f"took {grown >> 20} MiB, the limit is {grown_bytes >> 20}"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux


NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2, 3, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]),
    st.integers(0, 2**64 - 1),
    st.integers(0, 300),
)


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(("bit", "byte", "four", "eight", "cut", "out", "twice", "in")),
        st.booleans(),
        st.integers(0, 2**32 - 1),
        st.integers(1, 64),
        NUMBERS,
        st.binary(min_size=1, max_size=16),
    ),
    min_size=1,
    max_size=4,
)


def changed_bytes(content: bytes, hot: int | None = None) -> st.SearchStrategy[bytes]:
    """`content` after one to four changes. Half of them lie in the first `hot` bytes.

    What is drawn does not depend on `content`: hypothesis found draws that did inconsistent.
    """

    def change(changes: list[tuple[str, bool, int, int, int, bytes]]) -> bytes:
        made = bytearray(content)
        for kind, is_near, place, length, number, added in changes:
            if not made:
                break
            at = place % (min(len(made), hot or len(made)) if is_near else len(made))
            if kind == "bit":
                made[at] ^= 1 << number % 8
            elif kind == "byte":
                made[at] = number % 256
            elif kind == "four":
                made[at : at + 4] = (number % 2**32).to_bytes(4, "little")
            elif kind == "eight":
                made[at : at + 8] = number.to_bytes(8, "little")
            elif kind == "cut":
                del made[at:]
            elif kind == "out":
                del made[at : at + length]
            elif kind == "twice":
                made[at:at] = made[at : at + length]
            else:
                made[at:at] = added
        return bytes(made)

    return CHANGES.map(change)


def written(value: Any, **options: Any) -> bytes:
    """`value` as JSON. A text such as "nested 5000" becomes lists so deep in each other."""
    text = json.dumps(value, **options)
    text = re.sub(r'"nested (\d+)"', lambda found: "[" * int(found[1]) + "]" * int(found[1]), text)
    return text.encode("utf-8", "surrogatepass")


SPELLED = (
    *("<|system|>", "<|user|>", "<|end|>", "<|begin|>", "<|im_start|>system\n", "</s>", "[INST]"),
    *("{{ 1/0 }}", "{% for x in range(9) %}", "\ue0000:0\ue001", "\0", "\r\n\r\n", "data: [DONE]"),
    *("../../etc/passwd", "http://127.0.0.1:1/", "x" * 5000, "é" * 3, "🌍", "\u2028", "\x1b[2J"),
    *("(a+)+$", "<tool_call>", "</tool_call>", "auto", "none", "doc-" + "0" * 32, "", " "),
)
TEXTS = st.one_of(st.sampled_from(SPELLED), st.text(max_size=20))
SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([-1, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**400]),
    st.floats(),
    st.sampled_from([1e308, -1e308, 1e-320, 0.5, -0.0]),
    TEXTS,
)
JSON: st.SearchStrategy[Any] = st.one_of(
    SCALARS,
    st.recursive(
        SCALARS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)
        ),
        max_leaves=8,
    ),
    st.sampled_from([5, 200, 980, 1000, 5000, 100_000]).map(lambda depth: f"nested {depth}"),
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every member of a JSON value."""
    keys = value.items() if isinstance(value, dict) else enumerate(value)
    found: list[tuple[Any, Any]] = []
    for key, member in list(keys):
        found.append((value, key))
        if isinstance(member, (dict, list)):
            found.extend(places(member))
    return found


@st.composite
def changed_json(
    draw: st.DrawFn, value: Any, hostile: st.SearchStrategy[Any] = JSON, most: int = 3
) -> Any:
    """`value`, a dict or list, after up to `most` changes of its members."""
    made = copy.deepcopy(value)
    for _ in range(draw(st.integers(0, most))):
        found = places(made)
        if not found:
            break
        container, key = draw(st.sampled_from(found))
        kind = draw(st.sampled_from(("replace", "replace", "remove", "repeat", "add", "swap")))
        if kind == "replace":
            container[key] = draw(hostile)
        elif kind == "remove":
            del container[key]
        elif kind == "repeat" and isinstance(container, list):
            container.extend([container[key]] * draw(st.sampled_from((1, 3, 200))))
        elif kind == "swap":
            other, place = draw(st.sampled_from(found))
            container[key] = copy.deepcopy(other[place])
        elif isinstance(container, dict):
            container[draw(TEXTS)] = draw(hostile)
    return made
