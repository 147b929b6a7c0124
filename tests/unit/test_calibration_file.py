"""Calibration files: what is in one, which one counts for a model, and how it is written."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gemserve.calibration import files as calibration
from gemserve.calibration.files import (
    Calibration,
    find_calibration,
    place_for,
    read_calibration,
    write_calibration,
)
from gemserve.config import (
    DEFAULT_KEEP,
    KNOWN_FILTER_LAYERS,
    EngineConfig,
    choose_calibration,
    resolve_engine,
)
from gemserve.errors import ConfigError
from gemserve.filtering.methods import METHODS
from gemserve.model.loading.loader import BUILTIN_PATH

WHOLE = {
    "filter_layer": 5,
    "heads": [[2, 1], [5, 3]],
    "ends_with": False,
    "coverage_bound": 0.37,
    "model": "org/name",
    "weights": "abc",
    "norms": "n0",
    "recall": {"words": 0.9, "meaning": 0.8},
}

ANSWERED = Calibration(layer=1, is_measured=True)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "_SHIPPED", tmp_path / "shipped")


def read(path: Path) -> Calibration:
    return read_calibration(path, num_layers=8, num_heads=4)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "calibration.json"
    write_calibration(path, WHOLE)
    assert read(path) == Calibration(
        layer=5,
        heads=((2, 1), (5, 3)),
        ends_with=False,
        coverage_bound=0.37,
        source=str(path),
        is_measured=True,
        window=Calibration.USUAL_SEGMENT,
    )


def test_a_file_of_an_earlier_version_has_a_layer_alone(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, {"filter_layer": 3})
    expected = Calibration(layer=3, heads=None, source=str(path), is_measured=False)
    assert read(path) == expected
    assert expected.coverage_bound == Calibration.GUESSED_BOUND


def test_a_file_whose_probes_had_the_question_s_words_is_used_and_says_what_it_lacks(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({name: WHOLE[name] for name in ("filter_layer", "heads")}))
    assert read(path).heads == ((2, 1), (5, 3))
    assert "gemserve calibrate finds heads that look for what is meant" in read(path).describe()
    path.write_text(json.dumps(WHOLE))
    assert "earlier version" not in read(path).describe()


def test_what_auto_keeps_is_read_and_older_files_do_not_say(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, WHOLE | {"auto_keep": 128})
    assert read(path).auto_keep == 128
    for old in (WHOLE, {"filter_layer": 3}, WHOLE | {"auto_keep": None}):
        write_calibration(path, old)
        assert read(path).auto_keep is None


@pytest.mark.parametrize("given", [True, False])
def test_what_older_files_say_of_a_second_look_is_ignored(given: bool, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, WHOLE | {"second_look": given})
    found = read(path)
    write_calibration(path, WHOLE)
    assert found == read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"auto_keep": 15}, "auto_keep=15 must be null or from 16 to 1073741824"),
        ({"auto_keep": 0}, "auto_keep=0 must be null or"),
        ({"auto_keep": (1 << 30) + 1}, "auto_keep=1073741825 must be null or"),
        ({"auto_keep": 128.0}, "auto_keep=128.0 must be null or"),
        ({"auto_keep": 0.1}, "auto_keep=0.1 must be null or"),
        ({"auto_keep": True}, "auto_keep=True must be null or"),
        ({"auto_keep": "auto"}, "auto_keep='auto' must be null or"),
        ({"filter_layer": None}, "filter_layer=None must be an integer"),
        ({"filter_layer": True}, "filter_layer=True must be an integer"),
        ({"filter_layer": 2.0}, "filter_layer=2.0 must be an integer"),
        ({"filter_layer": 8}, "filter_layer=8: the model has 8 layers"),
        ({"filter_layer": -1}, "filter_layer=-1: the model has 8 layers"),
        ({"coverage_bound": 1.5}, "coverage_bound=1.5 must be from 0 to 1"),
        ({"coverage_bound": -0.1}, "coverage_bound=-0.1 must be"),
        ({"coverage_bound": True}, "coverage_bound=True must be"),
        ({"coverage_bound": "0.5"}, "coverage_bound='0.5' must be"),
        ({"coverage_bound": float("nan")}, "coverage_bound=nan must be"),
        ({"ends_with": 1}, "ends_with=1 must be true or false"),
        ({"heads": []}, "heads=[] must be a list of [layer, head] pairs"),
        ({"heads": [[6, 0]]}, "heads=[[6, 0]] must be a list"),  # above the filter layer
        ({"heads": [[5, 4]]}, "layers from 0 to 5 and heads from 0 to 3"),
        ({"heads": [[-1, 0]]}, "heads=[[-1, 0]] must be"),
        ({"heads": [[0, 1, 2]]}, "heads=[[0, 1, 2]] must be"),
        ({"heads": [[True, 1]]}, "heads=[[True, 1]] must be"),
        ({"heads": [[0, 1.0]]}, "heads=[[0, 1.0]] must be"),
        ({"heads": {"0": 1}}, "heads={'0': 1} must be"),
    ],
)
def test_a_broken_field_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(WHOLE | change))
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"layer": 3}', '"filter_layer"'])
def test_what_is_no_calibration_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"calibration\.json: no readable filter_layer"):
        read(path)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"\x00"])
def test_what_is_no_text_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "calibration.json").write_bytes(data)
    with pytest.raises(ConfigError, match=r"calibration\.json: no readable filter_layer"):
        read(tmp_path / "calibration.json")
    assert find_calibration("org/name", model="org/name", weights="abc") is None


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: cannot be read"):
        read(tmp_path / "none.json")


def found(source: Path | str, weights: str | None = "abc", model: str = "org/name") -> Path | None:
    return find_calibration(str(source), model=model, weights=weights)


def test_beside_the_model_then_cache_then_shipped(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shipped, beside = tmp_path / "shipped" / "x.json", model / "calibration.json"
    assert found(model) is None
    write_calibration(shipped, WHOLE)
    assert found(model) == shipped
    cached = place_for("", "abc")
    assert cached.is_relative_to(tmp_path / "cache" / "gemserve")
    write_calibration(cached, WHOLE)
    assert found(model) == found("org/name") == cached
    write_calibration(beside, {"filter_layer": 1})
    assert found(model) == beside


def test_a_file_counts_for_its_weights_alone(tmp_path: Path) -> None:
    """A finetuned copy in the same folder, or under the same name, kept the old layer."""
    model = tmp_path / "model"
    write_calibration(model / "calibration.json", WHOLE)
    assert found(model) == model / "calibration.json"
    assert found(model, "other") is None
    write_calibration(tmp_path / "shipped" / "a.json", WHOLE)
    assert found("org/name", "other") is None
    assert found("another/name") == tmp_path / "shipped" / "a.json"


def test_another_quantisation_of_the_model_comes_after_these_weights(tmp_path: Path) -> None:
    """A model had to be calibrated again for every file of it."""
    cache = tmp_path / "cache" / "gemserve" / "calibrations"
    write_calibration(cache / "a.json", WHOLE)
    find = partial(find_calibration, "", model="m", norms="n0")
    assert find(weights="other") == cache / "a.json"
    assert find(weights="other", norms="n1") is None
    assert find(weights="other", norms=None) is None
    write_calibration(cache / "b.json", WHOLE | {"weights": "other"})
    assert find(weights="other") == cache / "b.json"
    for weights, is_its_own in (("abc", True), ("other", False)):
        found = read_calibration(cache / "a.json", num_layers=8, num_heads=4, weights=weights)
        assert found.is_of_these_weights == is_its_own


def test_a_file_of_an_earlier_version_does_not_hide_a_better_one(tmp_path: Path) -> None:
    """Who had served a model before would never have got the calibration that comes with it."""
    old = {name: value for name, value in WHOLE.items() if name != "recall"}
    write_calibration(tmp_path / "cache" / "gemserve" / "calibrations" / "old.json", old)
    find = partial(find_calibration, "", model="m", weights="abc")
    assert find() == tmp_path / "cache" / "gemserve" / "calibrations" / "old.json"
    write_calibration(tmp_path / "shipped" / "new.json", WHOLE)
    assert find() == tmp_path / "shipped" / "new.json"


def test_where_weights_are_not_read_the_name_tells(tmp_path: Path) -> None:
    """Layers are placed before weights are read."""
    write_calibration(place_for("", "abc"), WHOLE)
    assert found("org/name", None) == place_for("", "abc")
    assert found("another/name", None, "another/name") is None
    write_calibration(tmp_path / "model" / "calibration.json", WHOLE)
    assert found(tmp_path / "model", None, "x") == tmp_path / "model" / "calibration.json"


def test_broken_files_of_others_are_passed_over(tmp_path: Path) -> None:
    """One half-written file in the cache kept every model from starting."""
    folder = place_for("", "abc").parent
    folder.mkdir(parents=True)
    for name, text in (("0", "{"), ("1", "[1]"), ("2", '{"weights": 3}'), ("3", "")):
        (folder / f"{name}.json").write_text(text)
    (folder / "4.json").mkdir()
    assert found("org/name") is None
    write_calibration(place_for("", "abc"), WHOLE)
    assert found("org/name") == place_for("", "abc")


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk left half a file, which stopped the next start."""
    path = tmp_path / "calibration.json"
    write_calibration(path, WHOLE)
    write = Path.write_text

    def fill(self: Path, text: str, **more: Any) -> int:
        write(self, text[:10], **more)
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fill)
        with pytest.raises(ConfigError, match=r"calibration\.json: cannot be written \(no space"):
            write_calibration(path, {"filter_layer": 1})
    assert read(path).layer == 5
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_calibration(tmp_path / "file" / "calibration.json", WHOLE)


def test_a_new_file_goes_where_it_may(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    cached = tmp_path / "cache" / "gemserve" / "calibrations" / "abc.json"
    assert place_for(str(model), "abc") == model / "calibration.json"
    for other in ("org/name", str(tmp_path / "none"), str(model / "m.gguf"), ""):
        assert place_for(other, "abc") == cached
    # the built-in model's folder once took the calibrations of whoever had cloned the repository
    assert place_for(str(BUILTIN_PATH), "abc") == cached
    installed = tmp_path / "site-packages" / "some"
    installed.mkdir(parents=True)
    assert place_for(str(installed), "abc") == cached
    assert place_for(str(Path(calibration.__file__).parent / "builtin" / "model"), "abc") == cached


def choose(
    given: int | None, found: Calibration | None, windows: list[int | None], **shape: int
) -> Calibration:
    sizes = {"hidden_size": 64, "vocab_size": 100, **shape}
    return choose_calibration(
        given, found, num_layers=len(windows), sliding_windows=windows, **sizes
    )


def test_the_given_layer_then_the_found_then_a_guess() -> None:
    measured = Calibration(layer=3, heads=((2, 0),), is_measured=True, source="file")
    windows: list[int | None] = [None] * 10
    assert choose(3, measured, windows) is measured
    other = choose(4, measured, windows)
    assert (other.layer, other.heads, other.is_measured) == (4, None, False)
    assert other.source == "set by --filter-layer"
    assert choose(None, measured, windows) is measured
    assert choose(None, None, windows) == Calibration(layer=4, source="guessed from the depth")
    for given in (-1, 10):
        with pytest.raises(ConfigError, match=f"filter_layer={given}: the model has 10 layers"):
            choose(given, measured, windows)


def test_a_guess_is_a_layer_that_sees_everything() -> None:
    """Gemma-3 has one such layer in six: 40% of the depth was a window of 512 tokens."""
    windows: list[int | None] = [None if (i + 1) % 6 == 0 else 512 for i in range(26)]
    assert choose(None, None, windows).layer == 11
    # ties go to the earlier, which is faster
    assert choose(None, None, [None, 9, 9, 9, 9, 9, 9, 9, None, 9]).layer in (0, 8)
    assert choose(None, None, [100] * 10).layer == 4  # refused when prompts are long
    assert choose(None, None, [None]).layer == 0
    (shape, known) = next(iter(KNOWN_FILTER_LAYERS.items()))
    papers = choose(None, None, [None] * shape[0], hidden_size=shape[1], vocab_size=shape[2])
    assert papers == Calibration(layer=known, source="from GemFilter's paper")
    assert not papers.is_measured


@pytest.mark.parametrize(
    ("config", "calibration", "wanted"),
    [
        (EngineConfig(), ANSWERED, "whole"),
        (EngineConfig(), replace(ANSWERED, auto_keep=128), "filter"),
        (EngineConfig(), replace(ANSWERED, auto_keep=128, more_distracts=False), "whole"),
        (EngineConfig(), replace(ANSWERED, auto_keep=DEFAULT_KEEP), "whole"),
        (EngineConfig(when_cached="whole"), replace(ANSWERED, auto_keep=128), "whole"),
        (EngineConfig(when_cached="filter"), ANSWERED, "filter"),
    ],
)
def test_a_model_that_answers_best_from_few_tokens_does_not_read_cached_prompts_whole(
    config: EngineConfig, calibration: Calibration, wanted: str
) -> None:
    """A further question to a small model was answered from all of the document, and wrongly."""
    resolved = resolve_engine(
        config, calibration, is_adaptive=True, num_layers=4, context_tokens=100
    )
    assert resolved.when_cached == wanted


@pytest.mark.parametrize(
    ("config", "calibration", "keep"),
    [
        (EngineConfig(), Calibration(layer=1, is_measured=True), DEFAULT_KEEP),
        (EngineConfig(), Calibration(layer=1), "auto"),
        (EngineConfig(filter_layer=1), Calibration(layer=1), DEFAULT_KEEP),
        (EngineConfig(filter_method="gemfilter"), Calibration(layer=1), DEFAULT_KEEP),
        (EngineConfig(filter_keep=99), Calibration(layer=1), 99),
        (EngineConfig(filter_keep="auto"), Calibration(layer=1, is_measured=True), "auto"),
        (EngineConfig(), replace(ANSWERED, auto_keep=128), "auto"),
        (EngineConfig(), replace(ANSWERED, auto_keep=128, more_distracts=False), "auto"),
        (EngineConfig(), replace(ANSWERED, auto_keep=DEFAULT_KEEP), DEFAULT_KEEP),
        (EngineConfig(filter_keep=99), replace(ANSWERED, auto_keep=128), 99),
        (EngineConfig(filter_method="gemfilter"), replace(ANSWERED, auto_keep=128), DEFAULT_KEEP),
    ],
)
def test_a_guessed_layer_and_a_small_model_keep_what_auto_says(
    config: EngineConfig, calibration: Calibration, keep: Any
) -> None:
    resolved = resolve_engine(
        config,
        calibration,
        is_adaptive=METHODS[config.filter_method].is_adaptive,
        num_layers=4,
        context_tokens=100,
    )
    assert (resolved.filter_keep, resolved.filter_layer) == (keep, 1)
