"""What `benchmarks/peers.py` starts other servers with; they themselves are not needed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.other_servers import peer_models, peer_servers
from benchmarks.other_servers.peer_servers import Room, Setup
from gemserve.config import ModelConfig
from gemserve.errors import ModelError
from gemserve.model.loading.checkpoint import open_checkpoint

ARGUMENTS = argparse.Namespace(
    lengths=[1024, 16_384], streams=[1, 16], mixed=[8], decode_tokens=192, answer_tokens=32
)
MEBIBYTES = 64
HOLD_MEMORY = f"import sys; held = b'x' * ({MEBIBYTES} << 20); print(flush=True); sys.stdin.read()"


def test_servers_have_room_for_what_they_are_asked() -> None:
    """A context of 8,192 tokens for everything refused longer prompts."""
    rooms = peers.rooms(["ttft", "decode", "memory"], ARGUMENTS)
    assert list(rooms) == ["ttft", "decode"]
    assert rooms["ttft"].streams == 1
    assert 16_384 + 128 < rooms["ttft"].context < 17_000
    assert rooms["decode"].streams == 16
    assert rooms["decode"].context < 2048  # 16 long streams would not fit into memory


def test_memory_alone_starts_the_servers_too() -> None:
    assert list(peers.rooms(["memory"], ARGUMENTS)) == ["start"]
    assert peers.rooms(["documents"], ARGUMENTS) == {}


def test_the_context_for_the_longest_prompts_of_smollm2_is_all_that_it_has() -> None:
    assert peers.context_of(7900, 2) == 8192


def test_a_model_is_called_as_its_file() -> None:
    assert peer_models.name_of("smollm2") == "smollm2"
    assert peer_models.name_of("/models/qwen2.5-coder-q4_k_m.gguf") == "qwen2.5-coder-q4_k_m"


def test_a_model_that_is_no_gguf_file_is_refused() -> None:
    with pytest.raises(ModelError, match="builtin"):
        peer_models.gguf_file("builtin")


def test_a_native_llama_server_gets_the_file_and_a_context_for_each_stream(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.touch()
    program = tmp_path / "llama-server"
    setup = Setup(model=str(file), models=tmp_path, llama_server=program)
    command = peer_servers.SERVERS["llama.cpp-native"](setup, Room(4, 1536), 8460)
    assert command.words[0] == str(program)
    options = dict(zip(command.words[1:], command.words[2:], strict=False))
    assert options["--model"] == str(file)
    assert options["--alias"] == "a"
    assert options["--parallel"] == "4"
    assert options["--ctx-size"] == str(4 * 1536)


def test_vllm_gets_memory_for_all_streams(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer_models, "kv_bytes_per_token", lambda model: 28 << 10)
    setup = Setup(model="a.gguf", models=tmp_path)
    assert peer_servers.vllm_kv_gib(setup, Room(1, 16_896)) == 1
    assert peer_servers.vllm_kv_gib(setup, Room(16, 16_896)) == 8


def test_keys_and_values_of_a_token_are_counted_in_all_layers() -> None:
    config = open_checkpoint(ModelConfig(model="builtin")).config
    size = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    assert peer_models.kv_bytes_per_token("builtin") == size


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="it reads Linux's /proc")
def test_the_memory_of_a_process_has_that_of_those_it_started() -> None:
    before = peer_servers.resident_bytes(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_MEMORY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        grown = peer_servers.resident_bytes(os.getpid()) - before
        child.communicate()
    assert MEBIBYTES << 20 <= grown < (MEBIBYTES + 32) << 20
