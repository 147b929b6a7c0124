"""Which heads find what is asked for, on observations made by hand; and which layer is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gemserve.calibration.search import choose_layer as calibration
from gemserve.calibration.search.choose_layer import check_found
from gemserve.calibration.search.coverage_bound import choose_bound
from gemserve.calibration.search.head_search import (
    Observation,
    balanced,
    best_heads,
    observation_of,
    recall_of,
    recalls,
    single_recalls,
)
from gemserve.calibration.search.observe import observe
from gemserve.calibration.search.result import LayerResult
from gemserve.config import EngineConfig
from gemserve.contract.prompt_parts import Priority, ProtectedRange
from gemserve.engine.core import Core
from gemserve.errors import ConfigError
from gemserve.model.passes.causal_model import CausalModel
from gemserve.prompting.prompt import Prompt
from tests import models
from tests.cores import core_over
from tests.model.test_selection import NoText

MEMORY = 64 << 20
TOKENS = 320  # of a hand-made document: 20 and 10 may be kept


def core_of(model: CausalModel, **settings: Any) -> Core:
    config = EngineConfig(kv_memory_bytes=MEMORY, filter_min_tokens=0, filter_layer=2, **settings)
    return core_over(model, NoText(), config, frozenset())


def seen(
    looks: dict[tuple[int, int], list[int]], gold: list[int], kind: str = "place"
) -> Observation:
    """Two layers of three heads; each of `looks` looks at some places, the others at the first."""
    scores = torch.linspace(0.002, 0.001, TOKENS).repeat(2, 3, 1)
    for layer in range(2):
        for head in range(3):
            scores[layer, head, looks.get((layer, head), [0])] = 0.5
    return Observation(
        kind=kind,
        layers=[0, 3],
        scores={False: scores.half(), True: scores.half()},
        document=torch.arange(TOKENS),
        gold=torch.tensor(gold, dtype=torch.long),
        passages=1 + torch.arange(TOKENS) // 40,
    )


def test_recall_is_of_passages_as_sieve_keeps_them() -> None:
    """A token beside the one looked at is found, too: names are looked at by a part of them."""
    probe = seen({(1, 0): [100]}, [100, 105, 200])
    found = recalls(probe.scores[False], probe, 1 / 16)
    assert found.shape == (2, 3)
    assert float(found[1, 0]) == pytest.approx(2 / 3)
    assert float(found[0].amax()) == 0.0
    # a thirty-second are 10 tokens, of a passage of 17
    looks = {(0, 1): [100], (0, 2): [100, 200]}
    both = seen(looks, [100, 200])
    assert recall_of([(0, 2)], both, False) == 1.0
    assert recall_of([(0, 1)], both, False) == 0.5


def test_a_long_passage_is_found_by_what_is_looked_at_in_it() -> None:
    """A function of 80 tokens could not be among the best 64, so no head found any code."""
    probe = seen({(0, 1): [130]}, list(range(100, 180)))
    assert recall_of([(0, 1)], probe, False) == 1.0


def test_a_head_that_looks_at_nothing_finds_nothing() -> None:
    """All its scores were zero in half precision: every token tied, and all of them were found."""
    probe = seen({}, [100, 150, 200])
    probe.scores[False].zero_()
    probe.scores[False][1, 1, 50] = 0.9
    assert float(recalls(probe.scores[False], probe, 1 / 16).amax()) < 1.0
    assert recall_of([(3, 1)], probe, False) < 1.0


def test_heads_that_complete_each_other_are_found_together() -> None:
    """The best single heads all looked at the same thing."""
    easy, hard = [100], [200]
    looks = {(0, 0): easy, (0, 1): easy, (1, 2): hard}  # by place of the layer, and head
    asked = [seen(looks, easy), seen(looks, easy), seen(looks, hard)]
    singles = single_recalls(asked, False)
    assert singles.shape == (3, 2, 3)
    lower, recall = best_heads(asked, singles, 0, False)
    assert lower == ((0, 0),)  # one more of the same brings nothing
    assert recall.tolist() == [1.0, 1.0, 0.0]
    heads, recall = best_heads(asked, singles, 3, False)
    assert set(heads) == {(0, 0), (3, 2)}
    assert recall.tolist() == [1.0, 1.0, 1.0]
    assert list(heads) == sorted(heads)


def test_questions_by_words_and_by_meaning_count_half_each() -> None:
    """Probes repeated the question's words in the fact: the heads that do so were chosen."""
    weights = balanced(["place", "place", "place", "number", "cause"])
    assert weights.tolist() == pytest.approx([1 / 12] * 3 + [1 / 4, 1 / 2])
    assert balanced(["place", "place"]).tolist() == [0.5, 0.5]
    words, meaning = [100], [200]
    looks = {(0, 0): words, (1, 2): meaning}
    asked = [*[seen(looks, words)] * 9, seen(looks, meaning, kind="cause")]
    heads, _ = best_heads(asked, single_recalls(asked, False), 3, False)
    assert set(heads) == {(0, 0), (3, 2)}


def test_what_is_protected_is_no_document() -> None:
    """Recall counted the question's own tokens, which are kept anyway."""
    core = core_of(CausalModel(models.build("llama")))
    ids = torch.randint(6, models.VOCAB, (300,), generator=torch.Generator().manual_seed(0))
    prompt = Prompt(
        ids=ids.tolist(),
        protected=(
            ProtectedRange(290, 300, Priority.QUESTION),
            ProtectedRange(1, 20, Priority.SYSTEM),
            ProtectedRange(100, 132, Priority.HEAD),
        ),
    )
    (evidence,) = observe(core, [prompt], [list(range(285, 300))])
    observed = observation_of(evidence, "k", [(10, 25), (280, 295)], 5)
    assert observed.document.tolist() == list(range(20, 290))
    at = observed.document[observed.gold].tolist()
    assert at == [*range(20, 25), *range(280, 290)]
    # with the rows behind the question, more is looked at, never less
    assert bool((observed.scores[True] >= observed.scores[False]).all())
    assert bool((observed.scores[True] > observed.scores[False]).any())


@pytest.mark.parametrize(
    ("good", "bad", "bound"),
    [
        ([0.8, 0.9], [0.1, 0.2], 0.8),
        ([0.8, 0.9], [0.95], 0.0),
        ([], [0.3], 0.0),
        ([], [], 0.0),
        ([0.5], [], 0.0),
        ([0.1, *[0.8] * 19], [0.5] * 5, 0.8),  # one false alarm in twenty is allowed,
        ([0.1, *[0.8] * 18], [0.5] * 5, 0.0),  # more is not
    ],
)
def test_the_bound_has_few_false_alarms(good: list[float], bad: list[float], bound: float) -> None:
    chosen = choose_bound(good, bad)
    assert chosen == pytest.approx(bound, abs=1e-4)
    assert sum(g < chosen for g in good) <= 0.05 * len(good)


def layer_of(
    layer: int, meaning: float | None, words: float = 0.9, own: float = 0.5, **more: Any
) -> LayerResult:
    return LayerResult(
        layer=layer,
        heads=more.pop("heads", ((layer, 0),)),
        ends_with=False,
        recall=words if meaning is None else (words + meaning) / 2,
        words=words,
        meaning=meaning,
        own_recall=own,
        work=layer / 8,
        **more,
    )


def chosen(rows: list[LayerResult], prefers: Any = "quality", num_layers: int = 8) -> int:
    return calibration._choose(rows, prefers, num_layers).layer


def test_the_earliest_layer_about_as_good_as_the_best_by_meaning_is_taken() -> None:
    """The cheapest layer that found the question's words was taken, and found nothing else."""
    rows = [layer_of(1, 0.3, 0.99), layer_of(2, 0.93), layer_of(3, 0.95), layer_of(4, 0.9)]
    assert chosen(rows) == 2
    assert chosen([rows[0], layer_of(2, 0.91), *rows[2:]]) == 3
    # a layer that brings no head of its own is the one below it, and slower
    assert chosen([rows[0], layer_of(2, 0.93, heads=((1, 0),)), *rows[2:]]) == 3
    assert chosen(rows, "speed") == 1


def test_a_model_that_finds_nothing_by_meaning_is_judged_by_words() -> None:
    assert chosen([layer_of(1, None, 0.8), layer_of(2, None, 0.9), layer_of(3, None, 0.92)]) == 2


def test_a_layer_that_is_too_deep_is_not_taken() -> None:
    """Reading most layers of everything saves nothing."""
    assert chosen([layer_of(2, 0.7), layer_of(5, 0.8), layer_of(6, 0.95)]) == 5


def test_a_model_that_understands_little_is_judged_by_what_it_understands() -> None:
    """Below a recall of 0.7 only the very best layer was good enough, however deep."""
    assert chosen([layer_of(1, 0.5), layer_of(2, 0.64), layer_of(3, 0.66)]) == 2


def test_probes_that_tell_nothing_write_nothing() -> None:
    """Layer 0 was written where all layers did equally well, or none."""
    check_found([layer_of(0, None, 0.3, 0.3), layer_of(1, None, 0.9)], 8)
    check_found([layer_of(0, None, 0.7)], 8)
    with pytest.raises(ConfigError, match=r"the best heads find 0\.69 .* less than 0\.7: nothing"):
        check_found([layer_of(0, None, 0.3), layer_of(1, None, 0.69)], 8)
    with pytest.raises(ConfigError, match=r"all layers do equally well, 0\.50: nothing"):
        check_found([layer_of(0, 0.9), layer_of(1, 0.9)], 8)
    for layers, count in (([], 0), ([layer_of(0, 0.9), layer_of(1, 0.8)], 0)):
        with pytest.raises(ConfigError, match="no head of this model finds any kind of probe"):
            check_found(layers, count)
