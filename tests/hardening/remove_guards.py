"""Takes each of these guards out of a copy of the server, and shows that its test fails without it.

    python tests/hardening/remove_guards.py [WORD ...]   only tests with one of the words

It takes minutes, so it is no part of `make test`. They are the guards whose loss would hurt users
most. tests/distribution/test_hardening_table.py checks that each still stands where it is looked
for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Guard(NamedTuple):
    """In `file` of the package gemserve `text` is replaced by `without`. Then `test` fails."""

    test: str
    file: str
    text: str
    without: str


# in pairs of lines: a test, below tests/, then FILE: TEXT -> WITHOUT
_GUARDS = r"""
hardening/test_keys_and_adapters.py::test_every_path_but_the_probes_needs_a_key
    api/access/gate.py: scope["path"] in self._open_paths -> not scope["path"].startswith("/v1")
e2e/test_hosts.py::test_a_page_cannot_reach_a_keyless_server_by_its_own_name
    api/outer_middleware.py: if hosts is not None: -> if False:
hardening/test_keys_and_adapters.py::test_keys_share_no_cached_documents
    engine/core.py: self._queue(request, replace(request, tenant=tenant)) -> self._queue(request, replace(request, tenant=b""))
hardening/test_keys_and_adapters.py::test_an_adapter_is_part_of_what_is_cached
    engine/sequence/sequence.py: None if adapter is None else (adapter.name, -> None if True else (adapter.name,
unit/test_document_cache_tenants.py::test_one_tenant_s_flood_leaves_the_others_documents
    engine/cache/document_cache.py: (-held[d.key.tenant], d.last_used) -> (0, d.last_used)
hardening/test_keys_and_adapters.py::test_adapters_come_from_their_folder_only
    adapters/find_folder.py: or ".." in parts -> or False
hardening/test_refusals.py::test_a_chat_that_a_template_makes_endless_is_refused
    bounded_jinja.py: if time.thread_time() > self._ends_s: -> if False:
api/test_limits.py::test_a_body_too_large_is_a_413
    api/access/body_limit.py: if self.num_bytes > self._max_bytes: -> if False:
e2e/test_connections.py::test_bodies_share_a_memory_and_short_ones_pass
    api/access/body_limit.py: if not self.held.grow(self.num_bytes): -> if False:
hardening/test_refusals.py::test_a_full_queue_answers_before_the_body_is_read
    api/routes/submission.py: self.check_room(tenant)  # a full -> pass  # a full
hardening/test_refusals.py::test_prompts_that_wait_have_a_limit_together
    api/access/backlog.py: if not is_first and waiting + -> if False and waiting +
e2e/test_connections.py::test_a_connection_without_a_whole_head_ends
    http_server/connections.py: call_later(seconds, self._sent -> call_later(9999, self._sent
hardening/test_refusals.py::test_no_request_runs_for_ever
    api/replies/event_reader.py: call_later(left_s, self._end -> call_later(9999, self._end
contract/test_disconnect.py::test_a_dropped_request_stops_within_a_second
    api/replies/event_reader.py: while (await self._http.receive())["type"] != "http.disconnect": -> while True:
hardening/test_text_bytes.py::test_work_on_a_text_ends_when_its_client_leaves
    prompting/stopping.py: if event is not None and event.is_set(): -> if False:
hardening/test_streams.py::test_a_failure_before_the_first_token_is_an_error
    api/replies/choices_reply.py: yield data_event(failure_body(event)) -> pass
hardening/test_engine_faults.py::test_one_request_fails_and_the_others_are_answered
    decoding/sampling.py: torch.isfinite(best.values) & ~given.isnan().any(dim=-1) -> torch.ones_like(best.values, dtype=torch.bool)
hardening/test_engine_faults.py::test_a_dead_engine_is_seen_and_nothing_hangs
    api/routes/health.py: if engine.death is not None: -> if False:
"""  # noqa: E501


def _parse(text: str) -> list[Guard]:
    lines = text.strip().split("\n")
    changes = (line.strip().split(": ", 1) for line in lines[1::2])
    return [
        Guard(f"tests/{test}", file, *change.split(" -> "))
        for test, (file, change) in zip(lines[::2], changes, strict=True)
    ]


GUARDS = _parse(_GUARDS)


def fails_without(guard: Guard, copied: Path) -> bool:
    """Run the test on a copy of `server` without the guard."""
    path = copied / "gemserve" / guard.file
    original = path.read_text("utf-8")
    assert original.count(guard.text) == 1, guard
    path.write_text(original.replace(guard.text, guard.without), "utf-8")
    paths = [copied, ROOT / "kernels", ROOT / "clients", os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--timeout", "250", guard.test],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    path.write_text(original, "utf-8")
    outcome = ended.stdout.rstrip().split("\n")[-1]
    is_run = ended.returncode == 0 or (ended.returncode == 1 and " failed" in outcome)
    assert is_run, ended.stdout + ended.stderr  # it must fail by what it asserts
    return ended.returncode == 1


def main(words: list[str]) -> int:
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "server"
        shutil.copytree(ROOT / "server", copied)
        for guard in GUARDS:
            if words and not any(word in guard.test for word in words):
                continue
            fails = fails_without(guard, copied)
            survivors += not fails
            print("fails" if fails else "PASSES", guard.file, guard.test, flush=True)
    return min(survivors, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
