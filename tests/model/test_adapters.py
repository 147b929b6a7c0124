"""Adapters in the engine: against PEFT, against plain attention, alone against mixed."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from gemserve.adapters.adapter_store import AdapterStore
from gemserve.adapters.ntk import NTK
from gemserve.config import EngineConfig
from gemserve.contract.events import Finished, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.model.adapter import Adapter, AttentionOptions
from gemserve.model.passes.causal_model import CausalModel
from gemserve_kernels import Partial, ntk_part
from tests import adapters, models
from tests.cores import core_over
from tests.kernels.test_ntk import features64
from tests.model.test_selection import NoText

MIB = 1 << 20
CONFIG = EngineConfig(kv_memory_bytes=24 * MIB, filter_min_tokens=64, filter_layer=2)
NONE = FilterParams(method="none", keep=16)


def core_of(model: CausalModel) -> Core:
    return core_over(model, NoText(), CONFIG, eos_ids=frozenset())


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, models.VOCAB, (num_tokens,), generator=generator).tolist()


def request(
    ids: list[int],
    adapter: Adapter | None,
    *,
    params: FilterParams = NONE,
    max_tokens: int = 12,
    name: str = "r",
) -> Request:
    return Request(
        request_id=name,
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        filter=params,
        adapter=adapter,
    )


def run(core: Core, requests: list[Request]) -> list[list[int]]:
    """All at once; their tokens, in order."""
    jobs = [core.add(one) for one in requests]
    tokens: dict[Any, list[int]] = {job: [] for job in jobs}
    while not core.is_idle:
        for job, event in core.step():
            if isinstance(event, TextDelta):
                tokens[job] += event.token_ids
            elif isinstance(event, Finished):
                assert event.error is None, event.error
        core.check_integrity()
    return [tokens[job] for job in jobs]


def generate(hf: Any, ids: list[int], count: int = 12) -> list[int]:
    made = hf.generate(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
    )
    return list(made[0, -count:].tolist())


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
def test_peft_prefix_as_peft_runs_it(tmp_path: Path, name: str) -> None:
    """A prefix at offset 0, or with rotated keys, is off by whole numbers."""
    peft = adapters.write_peft(tmp_path / "p", models.build(name), "prefix")
    ids = prompt(90)
    expected = generate(peft, ids)
    model = CausalModel(models.build(name))
    store = AdapterStore(model, tmp_path, MIB)
    store.load("p", "p")
    core = core_of(model)
    assert run(core, [request(ids, store.get("p"))]) == [expected]
    assert expected != run(core, [request(ids, None)])[0]


@pytest.mark.parametrize("name", ["llama", "phi3-longrope"])
def test_peft_lora_as_peft_runs_it(tmp_path: Path, name: str) -> None:
    target = ["qkv_proj"] if name.startswith("phi3") else ["q_proj", "v_proj", "down_proj"]
    peft = adapters.write_lora(tmp_path / "l", models.build(name), target_modules=target)
    ids = prompt(90)
    expected = generate(peft, ids)
    model = CausalModel(models.build(name))
    store = AdapterStore(model, tmp_path, MIB)
    store.load("l", "l")
    core = core_of(model)
    plain = run(core, [request(ids, None)])[0]
    assert run(core, [request(ids, store.get("l"))]) == [expected]
    assert run(core, [request(ids, None)])[0] == plain != expected, "the base must stay as it is"


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True, "lora_alpha": 6},
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 24}},
        {"target_modules": r".*\.[01]\.self_attn\.(q|o)_proj"},
        {"layers_to_transform": [0, 3]},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_settings_of_a_lora_as_peft_takes_them(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], **settings}
    peft = adapters.write_lora(tmp_path / "l", models.build("llama"), **config)
    ids = prompt(60)
    expected = generate(peft, ids)
    model = CausalModel(models.build("llama"))
    store = AdapterStore(model, tmp_path, MIB)
    store.load("l", "l")
    assert run(core_of(model), [request(ids, store.get("l"))]) == [expected]


def naive_ntk_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    term: dict[str, torch.Tensor] | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Algorithm 2 in float64, with everything exponentiated as it stands."""
    assert term is not None
    q, k, v = (t[0].double() for t in (query, key, value))
    group, rows = q.shape[0] // k.shape[0], q.shape[1]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = (q @ k.transpose(1, 2) * (scaling or q.shape[-1] ** -0.5)).exp()
    visible = torch.ones(rows, rows).tril().bool()
    if sliding_window is not None:
        visible &= ~torch.ones(rows, rows).tril(-sliding_window).bool()
    scores = scores * visible
    z_a, z_b, c = (term[name][module.layer_idx].double() for name in ("z_a", "z_b", "k"))
    features = features64(q, c.shape[-1])
    above = scores @ v + features @ z_a @ z_b
    below = scores.sum(-1) + torch.einsum("hqr,hr->hq", features, c)
    return (above / below[..., None]).float().transpose(0, 1)[None], None


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt", "mistral-window"])
def test_ntk_as_algorithm_2(tmp_path: Path, name: str) -> None:
    AttentionInterface.register("naive-ntk", naive_ntk_attention)
    hf = models.build(name, scale=1.5)
    model = CausalModel(models.build(name, scale=1.5))
    adapters.write(tmp_path / "n", "ntk", model)
    term, _ = adapters.tensors("ntk", model)
    hf.config._attn_implementation = "naive-ntk"
    ids = prompt(120)
    expected: list[int] = []
    with torch.inference_mode():
        for _ in range(3):
            logits = hf(input_ids=torch.tensor([ids + expected]), term=term, use_cache=False).logits
            expected.append(int(logits[0, -1].argmax()))
    store = AdapterStore(model, tmp_path, 16 * MIB)
    store.load("n", "n")
    core = core_of(model)
    assert run(core, [request(ids, store.get("n"), max_tokens=3)]) == [expected]
    assert expected != run(core, [request(ids, None, max_tokens=3)])[0]


def test_activation_is_added_before_its_layer(tmp_path: Path) -> None:
    hf, model = models.build("llama"), CausalModel(models.build("llama"))
    adapters.write(tmp_path / "a", "activation", model)
    made, _ = adapters.tensors("activation", model)
    hook = hf.model.layers[1].register_forward_pre_hook(
        lambda _, inputs: (inputs[0] + made["vector"], *inputs[1:])
    )
    ids = prompt(90)
    expected = generate(hf, ids)
    hook.remove()
    store = AdapterStore(model, tmp_path, MIB)
    store.load("a", "a")
    assert run(core_of(model), [request(ids, store.get("a"))]) == [expected]
    assert expected != generate(hf, ids)


def test_a_term_stands_beside_attention_sinks(tmp_path: Path) -> None:
    """The term's merge left the sinks of gpt-oss out, which are in the layers' own."""
    model = CausalModel(models.build("llama"))
    store = AdapterStore(model, adapters.write(tmp_path / "n", "ntk", model).parent, MIB)
    store.load("n", "n")
    adapter = store.get("n")
    assert isinstance(adapter, NTK)
    heads, dim = model.shape.num_heads, model.shape.head_dim
    query, out = torch.randn(2, heads, 3, dim, generator=torch.Generator().manual_seed(0))
    part = Partial(out, torch.full((heads, 3), 0.5))
    sinks = torch.linspace(-1.0, 2.0, heads)
    options = AttentionOptions(scale=1.0, sinks=sinks)
    found = adapter.joined(1, query, [part], options, model.backend)
    term = ntk_part(query, adapter.z_a[1], adapter.z_b[1], adapter.k[1])
    assert term.mass is not None
    weight = torch.tensor(0.5).exp()
    below = weight + sinks.exp()[:, None] + term.mass
    torch.testing.assert_close(found, (weight * out + term.out) / below[..., None])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[CausalModel, AdapterStore]:
    root = tmp_path_factory.mktemp("adapters")
    model = CausalModel(models.build("llama"))
    for kind in ("ntk", "prefix", "activation"):
        adapters.write(root / kind, kind, model)
    adapters.write(root / "ntk2", "ntk", model, seed=5)
    adapters.write_peft(root / "lora", models.build("llama"), "lora")
    store = AdapterStore(model, root, 16 * MIB)
    for name in ("ntk", "ntk2", "prefix", "activation", "lora"):
        store.load(name, name)
    return model, store


@pytest.mark.parametrize("method", ["none", "sieve", "snapkv"])
def test_mixed_batch_equals_each_alone(
    mixed: tuple[CausalModel, AdapterStore], method: Any
) -> None:
    """Adapters must not leak into neighbours' rows, in any pass."""
    model, store = mixed
    params = FilterParams(method=method, keep=48)
    names = [None, "ntk", "prefix", "activation", "lora", "ntk", None, "ntk2"]
    requests = [
        request(
            prompt(150 + 7 * i, seed=i),
            None if name is None else store.get(name),
            params=params,
            name=f"{i}",
        )
        for i, name in enumerate(names)
    ]
    core = core_of(model)
    alone = [run(core, [one])[0] for one in requests]
    assert run(core, requests) == alone
    # the same prompt under each: none is silently left out
    ids = prompt(150)
    same = [request(ids, None if n is None else store.get(n), params=params) for n in names[:5]]
    assert len({tuple(tokens) for tokens in run(core, same)}) == 5


def test_filter_pass_runs_with_the_adapter(mixed: tuple[CausalModel, AdapterStore]) -> None:
    model, store = mixed
    core = core_of(model)
    seen = []
    for name in (None, "activation", "ntk", "prefix", "lora"):
        params = FilterParams(method="sieve", keep=48, return_selection=True)
        adapter = None if name is None else store.get(name)
        events = list(core.run_alone(request(prompt(400), adapter, params=params)))
        seen.append(events[0].report.selection)  # type: ignore[union-attr]
    assert len(set(seen)) == 5


def test_reload_leaves_the_running_stream_alone(tmp_path: Path) -> None:
    model = CausalModel(models.build("llama"))
    adapters.write(tmp_path / "n", "ntk", model, seed=1)
    store = AdapterStore(model, tmp_path, 16 * MIB)
    first = store.load("n", "n")
    core = core_of(model)
    ids = prompt(120)
    old = run(core, [request(ids, store.get("n"), max_tokens=20)])[0]

    job = core.add(request(ids, store.get("n"), max_tokens=20))
    tokens: list[int] = []

    def step() -> None:
        for of, event in core.step():
            if of is job and isinstance(event, TextDelta):
                tokens.extend(event.token_ids)

    while len(tokens) < 5:
        step()
    adapters.write(tmp_path / "n", "ntk", model, seed=2)
    second = store.load("n", "n")
    assert second.version != first.version
    renewed = core.add(request(ids, store.get("n"), max_tokens=20))
    while not core.is_idle:
        step()
    assert tokens == old
    assert run(core, [request(ids, store.get("n"), max_tokens=20)])[0] != old
    assert renewed.sequence.request.adapter is store.get("n")


def test_an_adapter_whose_numbers_overflow_is_named(tmp_path: Path) -> None:
    """The error was a 500 that spoke of the model's logits. Neighbours go on.

    This one is finite for the queries that are tried when it is loaded, but not for this model's.
    """
    model = CausalModel(models.build("llama", scale=12.0))
    made, _ = adapters.tensors("ntk", model)
    # Z and k are so large that only their quotient is an ordinary number
    huge = {
        name: tensor * {"z_a": 1e18, "z_b": 1e19, "k": 1e37}[name] for name, tensor in made.items()
    }
    adapters.write(tmp_path / "huge", "ntk", model, made=huge)
    store = AdapterStore(model, tmp_path, MIB)
    store.load("huge", "huge")
    core = core_of(model)
    alone = run(core, [request(prompt(90), None)])
    jobs = [core.add(request(prompt(90), of)) for of in (store.get("huge"), None)]
    ends, tokens = {}, []
    while not core.is_idle:
        for job, event in core.step():
            if isinstance(event, Finished):
                ends[job] = event
            elif isinstance(event, TextDelta) and job is jobs[1]:
                tokens += event.token_ids
    failed = ends[jobs[0]]
    assert failed.reason == "error"
    assert "adapter huge, version" in str(failed.error)
    assert ends[jobs[1]].error is None
    assert [tokens] == alone


@pytest.mark.parametrize("end", ["answer", "failure in a prompt", "failure in decoding"])
def test_a_request_that_ended_holds_no_adapter(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what it computed with: a traceback would, until the garbage collector runs."""
    model = CausalModel(models.build("llama"))
    adapters.write(tmp_path / "n", "ntk", model)
    store = AdapterStore(model, tmp_path, MIB)
    store.load("n", "n")
    joined, fails_on = NTK.joined, {"failure in a prompt": 120, "failure in decoding": 1}.get(end)

    def failing(self: NTK, layer: int, query: torch.Tensor, *rest: Any) -> Any:
        if query.shape[1] == fails_on:
            raise RuntimeError("out of memory")
        return joined(self, layer, query, *rest)

    monkeypatch.setattr(NTK, "joined", failing)
    # the compiled decode step does not call it
    core = core_over(model, NoText(), replace(CONFIG, cpu_step="off"), eos_ids=frozenset())
    gc.disable()
    try:
        finished = [*core.run_alone(request(prompt(120), store.get("n")))][-1]
        assert isinstance(finished, Finished)
        assert finished.reason == ("length" if end == "answer" else "error")
        del finished
        store.unload("n")
        assert store.num_bytes == 0
    finally:
        gc.enable()
