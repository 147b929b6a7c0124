"""Each family of causal language models is computed as transformers does, or refused by name."""

from __future__ import annotations

import os
from itertools import chain

import pytest
import torch

from gemserve.errors import ModelError
from gemserve.model.families.reach import Reach
from gemserve.model.loading.compatibility import check_servable
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.recurrent_state import PassStates
from tests.architectures import families
from tests.architectures.compare import LIMIT, compare
from tests.architectures.page import PAGE, lines_of, row_of

# one of each way to attend, and one of each reason
SOME = (
    "afmoe bamba bart bert bloom codegen cohere2 ctrl deepseek_v2 deepseek_v3 diffllama doge "
    "falcon falcon_h1 gemma2 gemma3 gemma3n gemma4 gemma4_text glm4_moe_lite gpt2 gpt_bigcode "
    "gpt_oss gptj granite_swa jamba jetmoe lfm2 llama llama4_text longcat_flash mamba "
    "mimo_v2_flash minicpm3 minimax nemotron zamba zamba2 dbrx gemma4_assistant deepseek_v32 "
    "mistral mpt nemotron_h opt phimoe qwen2_moe qwen3_next recurrent_gemma stablelm"
)
IS_ALL = os.environ.get("GEMSERVE_TEST_FAMILIES") == "all"
CHOSEN = families.all_families() if IS_ALL else SOME.split()


@pytest.mark.parametrize("family", CHOSEN)
def test_a_family_is_as_the_page_says(family: str) -> None:
    row = row_of(family)
    listed = lines_of(PAGE.read_text(), row.table)
    if row.table != "served":
        assert row.line in listed
        return
    *cells, step = row.line.rsplit(" | ", 1)  # without a compiler there is no compiled step
    assert any(line.startswith(f"{cells[0]} | ") for line in listed), row.line
    assert row.line in listed or step == "no |"


def test_the_page_has_every_family() -> None:
    page = PAGE.read_text()
    tables = (lines_of(page, table) for table in ("served", "refused"))
    named = [line.split("`")[1] for line in chain.from_iterable(tables)]
    assert sorted(named) == families.all_families()


def test_a_stray_window_is_ignored_everywhere() -> None:
    """The compiled step took it from the config, and the layers never had it."""
    model = CausalModel(families.build("llama", sliding_window=families.WINDOW))
    assert model.config.sliding_window == families.WINDOW
    assert model.sliding_windows == (None,) * 4


def test_a_window_in_the_mask_only_is_found() -> None:
    """PhiMoE and Qwen2-MoE hand no window to their attention function."""
    assert CausalModel(families.build("phimoe")).reaches == (Reach(window=72),) * 4
    assert CausalModel(families.build("qwen2_moe")).sliding_windows == (72, None, None, None)


def test_chunks_of_a_sequence_begin_at_its_own_multiples() -> None:
    model = CausalModel(families.build("llama4_text"))
    assert model.reaches == (*[Reach(chunk=72)] * 3, Reach())
    first = Reach(chunk=72).first(torch.tensor([0, 71, 72, 200]))
    assert first.tolist() == [0, 0, 72, 144]


@pytest.mark.parametrize("window", [5, 40])
def test_windows_that_are_shorter_than_the_check(window: int) -> None:
    """The check at load ran a filter pass in a layer that sees less than its tokens."""
    compared = compare("mistral", sliding_window=window)
    assert compared.is_equal, compared


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lost_state_is_seen_in_half_precision(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Falcon-H1 without its state was served in bfloat16 with logits that were wrong by 3."""
    model = CausalModel(families.build("falcon_h1", dtype=dtype))
    check_servable(model)
    monkeypatch.setattr(PassStates, "get_recurrent_state", lambda *_, **__: None)
    with pytest.raises(ModelError, match=r"begin anew with every chunk|differ from its own by"):
        check_servable(model)


def test_phimoe_is_the_same_beside_a_longer_sequence() -> None:
    """Its scale came from the largest position of the batch."""
    compared = compare("phimoe")
    assert compared.neighbour <= LIMIT
    model = CausalModel(families.build("phimoe"))
    assert model.unscaled_tokens == 256
    rotary = model._rotary.replacement([100, 400])["rotary_emb"]
    positions = torch.tensor([[7, 7]])
    cos, _ = rotary(torch.zeros(1, 2, 64), position_ids=positions)
    for row, length in enumerate((100, 400)):
        alone = model._rotary.replacement([length])["rotary_emb"]
        assert torch.equal(cos[:, row], alone(torch.zeros(1, 1, 64), positions[:, :1])[0][:, 0])
    assert not torch.equal(cos[:, 0], cos[:, 1])


def test_sinks_count_in_every_pass() -> None:
    """They are parameters: with other ones, other logits."""
    with_sinks, without = (families.build("gpt_oss") for _ in range(2))
    for layer in without.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)
    ids = list(range(3, 60))
    logits = []
    for hf in (with_sinks, without):
        model = CausalModel(hf)
        kv = model.new_memory(8 * 60).kv(0, num_layers=4, capacity=60)
        logits.append(model.prefill_chunk(ids, start=0, kv=kv, rope_tokens=60, is_last=True))
    assert logits[0] is not None
    assert logits[1] is not None
    assert float((logits[0] - logits[1]).abs().max()) > 0.1
