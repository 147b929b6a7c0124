"""The store: its memory limit, who may stay, and what a LoRA's config must not be able to do."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gemserve.adapters import adapter_store as store_module
from gemserve.adapters.adapter_store import AdapterStore
from gemserve.errors import AdapterBusy, AdapterError, AdapterNotFound
from gemserve.model.passes.causal_model import CausalModel
from tests import adapters, models
from tests.fuzz.cases import bounded

MIB = 1 << 20


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel(models.build("llama"))


@pytest.fixture
def root(tmp_path: Path, model: CausalModel) -> Path:
    for index, name in enumerate("abc"):
        adapters.write(tmp_path / name, "prefix", model, seed=index)
    return tmp_path


def store_for(model: CausalModel, root: Path, count: float) -> AdapterStore:
    """With room for `count` of the adapters in `root`."""
    one = AdapterStore(model, root, MIB)
    return AdapterStore(model, root, int(count * one.load("a", "a").num_bytes))


def loaded(store: AdapterStore) -> dict[str, bool]:
    return {entry.name: entry.is_loaded for entry in store.list()}


def test_the_one_used_longest_ago_leaves_and_comes_back(model: CausalModel, root: Path) -> None:
    store = store_for(model, root, 2)
    for name in "ab":
        store.load(name, name)
    store.get("a")
    full = store.num_bytes
    store.load("c", "c")
    assert loaded(store) == {"a": True, "b": False, "c": True}
    assert (store.num_loaded, store.num_bytes) == (2, full)
    assert store.find("b") is None
    version = store.describe("b").version
    assert store.get("b").version == version
    assert loaded(store) == {"a": False, "b": True, "c": True}
    assert store.num_bytes == full


def test_one_in_use_is_counted_until_its_request_ends(model: CausalModel, root: Path) -> None:
    store = store_for(model, root, 2.5)
    store.load("a", "a")
    one = store.num_bytes
    running = [store.get("a")]
    store.unload("a")
    assert (store.num_bytes, store.num_loaded) == (one, 0)
    store.load("b", "b")
    running.append(store.get("b"))
    with pytest.raises(
        AdapterBusy, match=f"'c' needs {one} bytes; running requests hold {2 * one}"
    ):
        store.load("c", "c")
    assert loaded(store) == {"b": True}
    running.clear()
    store.load("c", "c")
    assert loaded(store) == {"b": True, "c": True}


def test_one_that_had_to_leave_while_in_use_is_not_loaded_twice(
    model: CausalModel, root: Path
) -> None:
    store = store_for(model, root, 1)
    store.load("a", "a")
    running = store.get("a")
    with pytest.raises(AdapterBusy):
        store.load("b", "b")
    assert loaded(store) == {"a": True}
    assert store.get("a") is running
    del running
    store.load("b", "b")
    assert loaded(store) == {"a": False, "b": True}


def test_one_that_never_fits_is_not_worth_waiting_for(model: CausalModel, root: Path) -> None:
    """Its file may be below the limit: float16 on disk, float32 in memory."""
    store = store_for(model, root, 1)
    store.load("a", "a")
    limit = store.num_bytes
    made, _ = adapters.tensors("prefix", model)
    half = {name: torch.cat([t, t], dim=2).half() for name, t in made.items()}
    adapters.write(root / "twice", "prefix", model, made=half)
    with pytest.raises(AdapterError, match=f"needs {2 * limit} bytes; all adapters may take"):
        store.load("twice", "twice")
    assert loaded(store) == {"a": True}


def test_a_replaced_one_makes_room_for_its_successor(model: CausalModel, root: Path) -> None:
    store = store_for(model, root, 2)
    store.load("a", "a")
    store.load("b", "b")
    before = store.describe("b").version
    replaced = store.load("b", "c")
    assert replaced.version != before
    assert (replaced.path, replaced.is_loaded) == ("c", True)
    assert loaded(store) == {"a": True, "b": True}


def test_a_bad_folder_leaves_its_name_as_it_was(model: CausalModel, root: Path) -> None:
    store = store_for(model, root, 1)
    store.load("a", "a")
    with pytest.raises(AdapterError, match="no such folder"):
        store.load("a", "nowhere")
    assert store.describe("a").path == "a"
    (root / "a" / "adapter.json").write_text("{")
    assert store.get("a").version == store.describe("a").version, "what is loaded needs no folder"
    store.load("b", "b")
    with pytest.raises(AdapterError, match=r"adapter 'a', path 'a': adapter\.json: not JSON"):
        store.get("a")
    assert loaded(store) == {"a": False, "b": True}


def test_unknown_names(model: CausalModel, root: Path) -> None:
    store = store_for(model, root, 1)
    for ask in (store.get, store.find, store.unload, store.describe):
        with pytest.raises(AdapterNotFound, match="'x' does not exist; loaded are: none"):
            ask("x")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Loading begins (the first), and goes on once the second is set."""
    begun, gate = threading.Event(), threading.Event()
    load = store_module.load_adapter

    def wait_and_load(*arguments: Any) -> Any:
        begun.set()
        assert gate.wait(20)
        return load(*arguments)

    monkeypatch.setattr(store_module, "load_adapter", wait_and_load)
    return begun, gate


def test_nobody_else_waits_while_a_folder_is_loaded(
    model: CausalModel, root: Path, slow: tuple[threading.Event, threading.Event]
) -> None:
    begun, gate = slow
    gate.set()
    store = AdapterStore(model, root, MIB)
    store.load("a", "a")
    begun.clear()
    gate.clear()
    thread = threading.Thread(target=store.load, args=("b", "b"))
    thread.start()
    assert begun.wait(20)
    assert store.get("a").name == "a"
    assert (loaded(store), store.num_loaded) == ({"a": True}, 1)
    assert store.num_bytes > 0
    gate.set()
    thread.join()
    assert loaded(store) == {"a": True, "b": True}


def test_many_requests_for_one_load_it_once(
    model: CausalModel, root: Path, slow: tuple[threading.Event, threading.Event]
) -> None:
    begun, gate = slow
    gate.set()
    store = store_for(model, root, 1)
    store.load("a", "a")
    store.load("b", "b")
    begun.clear()
    gate.clear()
    got: list[Any] = []
    threads = [threading.Thread(target=lambda: got.append(store.get("a"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert begun.wait(20)
    gate.set()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert len(set(map(id, got))) == 1


def test_one_unloaded_while_it_is_loaded_stays_unloaded(
    model: CausalModel, root: Path, slow: tuple[threading.Event, threading.Event]
) -> None:
    """Its request came first and is served; the name must not come back."""
    begun, gate = slow
    gate.set()
    store = store_for(model, root, 1)
    store.load("a", "a")
    store.load("b", "b")
    begun.clear()
    gate.clear()
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(store.get("a")))
    thread.start()
    assert begun.wait(20)
    store.unload("a")
    gate.set()
    thread.join()
    assert got[0].name == "a"
    assert loaded(store) == {"b": False}
    assert store.num_bytes == got[0].num_bytes


# Of a LoRA's config, each of which PEFT would take: the first three rewrite the base's weights.
HARMFUL: list[tuple[dict[str, Any], str]] = [
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa': not supported: it changes"),
    ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
    ({"kasa_config": {"beta": 1}}, "kasa_config={'beta': 1}: not supported"),
    ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
    ({"r": 10**9}, "r=1000000000: must be from 1 to 4"),
    ({"r": "4"}, "r='4': must be"),
    ({"r": True}, "r=True: must be"),
    ({"rank_pattern": {"q_proj": 10**9}}, "rank_pattern=1000000000: must be"),
    ({"rank_pattern": {"([a-z.]+)+!": 4}}, "names of modules"),
    ({"alpha_pattern": [1]}, "alpha_pattern=[1]: must be an object"),
    ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern='8': must be a number"),
    ({"lora_alpha": float("nan")}, "lora_alpha=nan: must be a number"),
    ({"lora_alpha": None}, "lora_alpha=None: must be a number"),
    ({"lora_alpha": 10**400}, "lora_alpha=an integer of 1329 bits: must be a number"),
    ({"\ud800": 1}, "ud800=1: not supported"),  # half a character, which no reply can carry
    ({"megatron_config": {"a": 1}, "megatron_core": "this"}, "megatron_config"),
    ({"runtime_config": {"ephemeral_gpu_offload": True}}, "runtime_config"),
    ({"target_parameters": ["experts.up"]}, "target_parameters"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']: not supported"),
    ({"layer_replication": [[0, 4], [2, 4]]}, "layer_replication"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
    ({"lora_bias": True}, "lora_bias=True"),
    ({"bias": "all"}, "bias='all': not supported"),
    ({"of_a_newer_peft": 1}, "of_a_newer_peft=1: not supported"),
    ({"use_dora": True}, "lora_magnitude_vector.default.weight': missing, and 7 more"),
    ({"r": 3}, "size mismatch"),
]


@pytest.mark.parametrize(("change", "said"), HARMFUL, ids=lambda value: str(value)[:40])
def test_a_lora_that_peft_should_not_be_shown_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    hf = models.build("llama")
    before = {key: p.clone() for key, p in hf.named_parameters()}
    adapters.write_peft(tmp_path / "l", models.build("llama"), "lora")
    path = tmp_path / "l" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    store = AdapterStore(CausalModel(hf), tmp_path, MIB)
    with pytest.raises(AdapterError) as caught:
        store.load("l", "l")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 600
    after = dict(hf.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], weight) for key, weight in before.items())


def test_a_lora_takes_no_more_memory_than_its_tensors(tmp_path: Path, model: CausalModel) -> None:
    """One tensor of four megabytes made PEFT allocate half a gigabyte for each module."""
    adapters.write_peft(tmp_path / "l", models.build("llama"), "lora")
    path = tmp_path / "l" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "r": 1_000_000}))
    weights = path.with_name("adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({**load_file(weights), name: torch.zeros(1_000_000, 1)}, weights)
    said = r"size mismatch for model\.layers\.0\.self_attn\.q_proj\.lora_A"
    with bounded("", cpu_s=20, grown_bytes=200 * MIB), pytest.raises(AdapterError, match=said):
        AdapterStore(model, tmp_path, 16 * MIB).load("l", "l")
