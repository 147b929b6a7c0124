"""Training: gradients, the adapter served is the adapter trained, files that are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemserve.adapters.adapter_store import AdapterStore
from gemserve.adapters.prefix import Prefix
from gemserve.cost import ModelShape
from gemserve.errors import AdapterError, ConfigError
from gemserve.model.adapter import NO_ADAPTER
from gemserve.model.passes.causal_model import CausalModel
from gemserve_kernels import Partial
from gemserve_train.conversion_texts import ConversionText
from gemserve_train.convert import ConvertConfig, convert
from gemserve_train.distill import Teacher, agreement
from gemserve_train.examples import TrainingExample, end_token, read_examples
from gemserve_train.forward import logits_with_gradients
from gemserve_train.parameters import (
    ActivationParameters,
    NTKParameters,
    Parameters,
    PrefixParameters,
    count_parameters,
    read_prefix,
)
from gemserve_train.trainer import AdaptedModel, TrainConfig, TrainResult, _arguments, train
from tests import models
from tests.model.test_adapters import core_of, prompt, request, run


def shape(layers: int, heads: int, kv_heads: int, head_dim: int) -> ModelShape:
    return ModelShape(
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=heads * head_dim,
        vocab_size=1,
        layer_params=1,
        qkv_params=1,
        element_bytes=2,
    )


@pytest.mark.parametrize(
    ("r", "s", "millions"),
    [(128, 4, 1.18), (128, 16, 4.33), (128, 64, 16.91), (256, 4, 1.84), (256, 64, 25.43)],
)
def test_parameter_counts_of_llama_8b(r: int, s: int, millions: float) -> None:
    count = count_parameters("ntk", shape(32, 32, 8, 128), r=r, s=s, length=1)
    assert round(count / 1e6, 2) == millions


def test_parameter_count_of_chatglm3_6b() -> None:
    count = count_parameters("ntk", shape(28, 32, 2, 128), r=128, s=16, length=1)
    assert round(count / 1e6, 2) == 3.78


def parameters_of(kind: str, model: CausalModel) -> Parameters:
    if kind == "ntk":
        made: Parameters = NTKParameters(model.shape, model.shape.head_dim, 2, seed=0)
        with torch.no_grad():
            made.z_b.normal_(generator=torch.Generator().manual_seed(1))
            made.log_k.fill_(0.0)
        return made
    if kind == "prefix":
        return PrefixParameters(model, prompt(4))
    return ActivationParameters(model.shape, layer=1, dtype=model.dtype)


@pytest.mark.parametrize("kind", ["ntk", "prefix", "activation"])
def test_gradients_are_those_of_the_loss(kind: str) -> None:
    """Numerically, in float64 throughout: OPT has no norm that computes in float32."""
    model = CausalModel(models.build("opt", scale=1.0).double())
    parameters = parameters_of(kind, model).double()
    adapted = AdaptedModel(model, parameters)
    ids = torch.tensor([prompt(12)])
    adapted(ids, ids)["loss"].backward()
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters.parameters():
        assert parameter.grad is not None
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        step = 1e-6 / direction.norm()  # φ jumps: no query may cross 0
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(sign * step * direction)
                losses.append(float(adapted(ids, ids)["loss"]))
                parameter.sub_(sign * step * direction)
        numeric = (losses[0] - losses[1]) / (2 * float(step))
        analytic = float((parameter.grad * direction).sum())
        assert numeric == pytest.approx(analytic, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_training_pass_equals_the_model(name: str) -> None:
    model = CausalModel(models.build(name))
    ids = torch.tensor([prompt(60), prompt(60, seed=1)])
    with torch.no_grad():
        ours = logits_with_gradients(model, NO_ADAPTER, ids)
        with model.attention_named("eager"):
            theirs = model.hf(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)


def test_an_ntk_term_starts_with_the_weight_of_attention() -> None:
    """Beside attention of weight e^13 a term of weight 1 and its gradients were nothing."""
    model = CausalModel(models.build("llama", scale=8.0))
    texts = [prompt(40), prompt(60, seed=1)]
    seen: dict[int, list[torch.Tensor]] = {}

    def record(layer: int, query: torch.Tensor, own: Partial, term: Partial) -> None:
        seen.setdefault(layer, []).append(own.lse)

    plain = NTKParameters(model.shape, model.shape.head_dim, 4, seed=0)
    beside = NTKParameters.beside(model, texts, model.shape.head_dim, 4, seed=0)
    for text in texts:
        logits_with_gradients(model, plain.adapter(), torch.tensor([text]), record)
    for layer, weights in seen.items():
        median = torch.cat(weights, 1).median(dim=1).values
        torch.testing.assert_close(beside.scale[layer], median.exp())
    assert beside.scale.min() > 2
    torch.testing.assert_close(
        beside.tensors()["k"], plain.tensors()["k"] * beside.scale[..., None]
    )

    ids = torch.tensor([texts[0]])
    norms = []
    for made in (plain, beside):
        made.zero_grad()
        AdaptedModel(model, made)(ids, ids)["loss"].backward()
        assert made.z_b.grad is not None
        norms.append(float(made.z_b.grad.norm()))
    assert norms[1] > norms[0]


def toy_examples(count: int, seed: int) -> list[TrainingExample]:
    """Whatever is asked, the answer is 7 8 9."""
    return [TrainingExample((*prompt(6, seed + i), 7, 8, 9), 6) for i in range(count)]


@pytest.mark.parametrize("kind", ["ntk", "prefix", "activation"])
def test_served_adapter_is_the_trained_one(tmp_path: Path, kind: str) -> None:
    model = CausalModel(models.build("llama", scale=1.0))
    parameters = (
        parameters_of(kind, model)
        if kind != "ntk"
        else NTKParameters.beside(model, [prompt(6)], model.shape.head_dim, 4, seed=0)
    )
    result = train(
        model,
        parameters,
        toy_examples(64, 0),
        toy_examples(8, 1000),
        tmp_path / "a",
        TrainConfig(epochs=6, learning_rate=3e-2, evals=4),
    )
    assert result.num_parameters == sum(t.numel() for t in parameters.tensors().values())
    assert result.eval_loss < 7.9  # chance: ln 4096 = 8.3
    store = AdapterStore(model, tmp_path, 1 << 20)
    store.load("a", "a")
    ids = list(toy_examples(1, 5000)[0].ids[:6])
    with torch.no_grad():
        logits = logits_with_gradients(model, parameters.adapter(), torch.tensor([ids]))
    served = run(core_of(model), [request(ids, store.get("a"), max_tokens=1)])
    assert served == [[int(logits[0, -1].argmax())]]


def test_stopped_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run with the same folder continues the first: same weights as without the stop."""
    from transformers import TrainerCallback

    model = CausalModel(models.build("llama", scale=1.0))
    config = TrainConfig(epochs=2, evals=4, patience=0)
    data = toy_examples(32, 0), toy_examples(8, 1000)
    whole = parameters_of("ntk", model)
    train(model, whole, *data, tmp_path / "whole", config)

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4:
                raise KeyboardInterrupt

    import transformers

    class Stopping(transformers.Trainer):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.add_callback(Stop())

    with monkeypatch.context() as patched:
        patched.setattr(transformers, "Trainer", Stopping)
        with pytest.raises(KeyboardInterrupt):
            train(model, parameters_of("ntk", model), *data, tmp_path / "cut", config)
    resumed = parameters_of("ntk", model)
    result = train(model, resumed, *data, tmp_path / "cut", config)
    assert result.steps == 8
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_text_as_prefix_is_that_text(tmp_path: Path) -> None:
    model = CausalModel(models.build("llama"))
    text, ids = prompt(40, seed=3), prompt(50)
    keys, values = read_prefix(model, text)
    core = core_of(model)
    prefix = Prefix("p", "1", keys=keys, values=values)
    assert run(core, [request(ids, prefix)]) == run(core, [request(text + ids, None)])


def test_conversion_comes_close_to_the_prefix() -> None:
    """Of a prefix that says much the same to everyone, which is what a short term can hold."""
    model = CausalModel(models.build("llama", scale=1.0))
    keys, values = read_prefix(model, prompt(40, seed=3))
    prefix = Prefix("", "", keys=keys, values=values + 1.0)
    probes = [ConversionText(tuple(prompt(24, seed=i)), num_prompt=1) for i in range(16)]
    config = ConvertConfig(r=model.shape.head_dim, s=4, fit_steps=150, distill_steps=5)
    teacher = Teacher(model, prefix)
    parameters, fit = convert(teacher, probes, config, lambda _: None)
    assert max(fit.fitted) < 0.2 * min(fit.without)
    before = agreement(teacher, None, probes[-2:])
    after = agreement(teacher, parameters.adapter(), probes[-2:])
    assert after.kl < 0.2 * before.kl
    assert parameters.adapter().num_positions == 40


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "line 1"),
        ("[]", "must be a JSON object"),
        ('{"prompt": "a"}', "fields prompt: must be prompt and completion, or messages"),
        ('{"prompt": "a", "completion": ""}', "must be a text, and not empty"),
        ('{"prompt": 1, "completion": "b"}', "prompt=1: must be a text"),
        ('{"messages": []}', "line 1"),
        (
            '{"messages": [{"role": "user", "content": "x"}]}',
            "messages: must be a list of at least 2",
        ),
        ('{"prompt": "a b c d e f g h i j k l", "completion": "b"}', "tokens, the limit is 8"),
        ("", "has no examples"),
    ],
)
def test_bad_examples_are_named(tmp_path: Path, tokenizer: Any, line: str, fault: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(AdapterError, match=r"data\.jsonl") as caught:
        read_examples(path, tokenizer, eos_id=2, max_tokens=8)
    assert fault in str(caught.value)


def test_only_the_completion_is_trained_on(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "data.jsonl"
    chat = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]
    lines = [{"prompt": "What?", "completion": "That."}, {"messages": chat}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for example in read_examples(path, tokenizer, eos_id=2, max_tokens=64):
        assert tokenizer.decode(example.ids[example.num_prompt : -1]) == "That."
        assert example.ids[-1] == 2


def test_a_folder_holds_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other data, settings or model were taken for a run to go on with, and nothing was trained."""
    model = CausalModel(models.build("llama"))
    data = (toy_examples(16, 0), toy_examples(4, 1000))
    config = TrainConfig(epochs=1, evals=1)

    def start(kind: str = "ntk", examples: Any = data, settings: TrainConfig = config) -> None:
        train(model, parameters_of(kind, model), *examples, tmp_path / "a", settings)

    with monkeypatch.context() as patched:
        patched.setattr("gemserve_train.trainer.run_trainer", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            start()
    for other, name in (
        ({"kind": "prefix"}, "type"),
        ({"examples": (toy_examples(16, 5), data[1])}, "examples"),
        ({"settings": replace(config, seed=3)}, "seed"),
    ):
        with pytest.raises(AdapterError, match=f"{name}=.* was stopped here"):
            start(**other)
    told = tmp_path / "a" / "checkpoints" / "run.json"
    before = told.read_text()
    told.write_text("{")
    with pytest.raises(AdapterError, match="does not tell which run"):
        start()
    told.unlink()
    (told.parent / "checkpoint-1").mkdir()
    with pytest.raises(AdapterError, match="does not tell which run"):
        start()
    (told.parent / "checkpoint-1").rmdir()
    told.write_text(before)
    start()
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "adapter.json",
        "adapter.safetensors",
        "loss.svg",
        "training.json",
    }
    modes = {path.stat().st_mode for path in (tmp_path / "a").iterdir()}
    assert len(modes) == 1, "others may read the description, but not the numbers"
    with pytest.raises(AdapterError, match="holds an adapter already"):
        start()
    (tmp_path / "file").touch()
    with pytest.raises(AdapterError, match="cannot be written"):
        train(model, parameters_of("ntk", model), *data, tmp_path / "file", config)


def test_answers_end_as_the_tokenizer_says(tokenizer: Any, tmp_path: Path) -> None:
    """Where a text's end had the lower id, as SmolLM2's has, chats learnt to end with that."""
    path = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text(json.dumps({"messages": turns}))
    assert tokenizer.eos_token_id == 2
    eos_id = end_token(tokenizer, {0, 2})
    assert read_examples(path, tokenizer, eos_id=eos_id, max_tokens=100)[0].ids[-1] == 2
    assert end_token(tokenizer, {5, 7}) == 5
    with pytest.raises(ConfigError, match="no token that ends an answer"):
        end_token(tokenizer, frozenset())


def test_training_that_diverges_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CausalModel(models.build("llama"))
    lost = TrainResult(steps=1, train_loss=1.0, eval_loss=float("nan"), num_parameters=1)
    monkeypatch.setattr("gemserve_train.trainer.run_trainer", lambda *_, **__: lost)
    with pytest.raises(AdapterError, match="diverged, its loss is nan"):
        train(
            model,
            parameters_of("ntk", model),
            toy_examples(4, 0),
            toy_examples(2, 9),
            tmp_path / "a",
            TrainConfig(),
        )
    assert not any((tmp_path / "a").iterdir())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"messages": "hello"}', "messages: must be a list"),
        ('{"messages": ["ab", "cd"]}', r"messages\[0\]: must have a role"),
        (
            '{"messages": [{"role": "zzz", "content": "a"}, {"role": "user", "content": "b"}]}',
            r"messages\[0\]: must have a role",
        ),
        (
            '{"messages": [{"role": "user", "content": null}, '
            '{"role": "assistant", "content": "b"}]}',
            r"messages\[0\].content=None: must be a text",
        ),
        ('{"prompt": "a\\ud800", "completion": "b"}', "prompt: is not valid Unicode"),
        ("[1]", r"\[1\]: must be a JSON object"),
        ("[" * 100_000, "line 1"),
    ],
)
def test_lines_that_are_no_examples(tmp_path: Path, tokenizer: Any, line: str, said: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(line)
    with pytest.raises(AdapterError, match=f"line 1: {said}" if "line" not in said else said):
        read_examples(path, tokenizer, eos_id=2, max_tokens=100)


def test_lines_end_where_jsonl_says(tmp_path: Path, tokenizer: Any) -> None:
    """JSON may hold U+2028 within a text, and Windows writes a mark first."""
    path = tmp_path / "data.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b", "completion": "c"}\r\n'.encode())
    assert len(read_examples(path, tokenizer, eos_id=2, max_tokens=100)) == 1


def test_a_prefix_that_a_window_would_lose_is_not_trained() -> None:
    """It was trained to the end, and could not be loaded then."""
    model = CausalModel(models.build("mistral-window"))
    with pytest.raises(AdapterError, match="would lose the prefix"):
        PrefixParameters(model, range(4))


def test_training_takes_one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each GPU got a part of a row's layout, and all of its tokens."""
    from transformers import TrainingArguments

    given: list[int] = []

    def set_on(_: object, count: int) -> None:
        given.append(count)

    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    monkeypatch.setattr(TrainingArguments, "_n_gpu", property(None, set_on), raising=False)
    _arguments(TrainConfig(), 10, tmp_path, torch.device("cpu"), is_quiet=True)
    assert given[-1] == 1
