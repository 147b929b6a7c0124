"""Which layer and heads of a model filter its prompts, and the files that store this.

A calibration belongs to weights, so files are found by a hash of the weights: beside the model,
among those that come with gemserve, or in the user's cache folder.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

from gemserve.contract.filter_options import MAX_KEEP, MIN_KEEP, MIN_SEGMENT, Keep, kept_count
from gemserve.errors import ConfigError, shown

FILE = "calibration.json"
FORMAT = 1  # also of files that name none, which earlier versions wrote
_MOST_BYTES = 1 << 20  # a hundred times as many as a calibration has
_SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """`layer`: where filter passes end. `heads`: the (layer, head) pairs that score tokens.

    `heads` None: all heads of `layer`. `ends_with`: the rows after the question are watched, too.
    `coverage_bound`: below it a choice is not trusted. `source`: where it comes from, in words.
    `is_measured`: it was found by probing these weights, not taken from a table or guessed.
    `window`: the most tokens of a segment in which documents are read; None: prompts are read as
    one sequence. `window_bound`: the bound of coverage for them. `auto_keep`: with `keep` "auto" no
    more tokens are kept of documents, because answers are no better from more; None: not measured.
    `more_distracts`: they are worse. `by_meaning`: probes in other words than their facts were
    among those that chose. `is_of_these_weights`: they were read by these weights, and not by
    others with the same norms, such as another quantisation. `is_awaited`: it is a guess that
    nothing is filtered by, because the model is yet to be calibrated.
    """

    GUESSED_BOUND: ClassVar[float] = 0.5
    USUAL_SEGMENT: ClassVar[int] = 1536  # of models whose heads are measured
    USUAL_SEGMENT_BOUND: ClassVar[float] = 0.34

    layer: int
    heads: tuple[tuple[int, int], ...] | None = None
    ends_with: bool = True
    coverage_bound: float = GUESSED_BOUND
    source: str = "guessed"
    is_measured: bool = False
    window: int | None = None
    window_bound: float = USUAL_SEGMENT_BOUND
    auto_keep: int | None = None
    more_distracts: bool = True
    by_meaning: bool = True
    is_of_these_weights: bool = True
    is_awaited: bool = False

    def most_kept(self, keep: Keep, num_tokens: int) -> int:
        """Number of tokens that `keep` means for documents of `num_tokens`. With "auto", the most.

        That is no more than the model answers best from.
        """
        count = kept_count(keep, num_tokens)
        if keep != "auto" or self.auto_keep is None:
            return count
        return min(count, self.auto_keep)

    def describe(self) -> str:
        """One line: the filter layer's origin, the heads, and the bound."""
        if self.is_awaited:
            return (
                "this model is not calibrated yet: that is done while there are no requests, and "
                "prompts are read whole until then"
            )
        if self.heads is None:
            return (
                f"filter layer {self.layer} is not calibrated ({self.source}): all its heads look"
            )
        heads = ", ".join(f"{layer}.{head}" for layer, head in self.heads)
        text = (
            f"filter layer {self.layer} is calibrated by {self.source}: heads {heads} look (layer."
            f"head), and a coverage below {self.coverage_bound:.2f} ({self.window_bound:.2f} of "
            "documents that are read in windows) is not trusted"
        )
        if self.auto_keep is not None:
            text += f"; keep auto keeps at most {self.auto_keep:,} tokens of documents"
        if not self.is_of_these_weights:
            text += "; it was measured on other weights of this model, such as another quantisation"
        if not self.by_meaning:
            text += (
                "; it is of an earlier version, which looked for the question's words alone: "
                "gemserve calibrate finds heads that look for what is meant"
            )
        return text


def read_calibration(
    path: Path, *, num_layers: int, num_heads: int, weights: str | None = None
) -> Calibration:
    """The calibration in a file. Raises `ConfigError` naming the field that is wrong.

    `weights`: the hash of those that it is for, if that is known. Files of earlier versions have
    only `filter_layer`, which means all heads of that layer, or heads that look for words alone.
    Some have `second_look`, which is ignored: whether the best passages are read twice.
    """
    try:
        text = _text_of(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except ValueError as error:  # no text, or too much of it
        raise ConfigError(f"{path}: no readable filter_layer ({error})") from error
    return parse_calibration(
        text, path, num_layers=num_layers, num_heads=num_heads, weights=weights
    )


def parse_calibration(
    text: str, path: Path, *, num_layers: int, num_heads: int, weights: str | None = None
) -> Calibration:
    """The calibration in a file's text. Raises `ConfigError` naming `path` and the field."""
    try:
        content = json.loads(text)
        if content.get("format", FORMAT) != FORMAT:  # whatever else is in it may mean other things
            raise ConfigError(
                f"{path}: format={shown(content['format'])}: this version of gemserve reads format "
                f"{FORMAT}; delete the file, or write it anew with gemserve calibrate"
            )
        layer = content["filter_layer"]
        heads = content.get("heads")
        bound = content.get("coverage_bound", Calibration.GUESSED_BOUND)
        ends_with = content.get("ends_with", True)
        window = content.get("window", None if heads is None else Calibration.USUAL_SEGMENT)
        window_bound = content.get("window_bound", Calibration.USUAL_SEGMENT_BOUND)
        auto_keep = content.get("auto_keep")
        more_distracts = content.get("more_distracts", True)
        by_meaning = heads is None or "recall" in content
        read_by = content.get("weights")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: no readable filter_layer ({error})") from error
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise ConfigError(f"{path}: filter_layer={shown(layer)} must be an integer")
    if not 0 <= layer < num_layers:
        raise ConfigError(
            f"{path}: filter_layer={shown(layer)}: the model has {num_layers} layers; gemserve "
            "calibrate finds it anew"
        )
    for name, value in (("coverage_bound", bound), ("window_bound", window_bound)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise ConfigError(f"{path}: {name}={shown(value)} must be from 0 to 1")
    is_size = isinstance(window, int) and not isinstance(window, bool) and window >= MIN_SEGMENT
    if window is not None and not is_size:
        raise ConfigError(f"{path}: window={shown(window)} must be null or at least {MIN_SEGMENT}")
    is_count = isinstance(auto_keep, int) and not isinstance(auto_keep, bool)
    if auto_keep is not None and not (is_count and MIN_KEEP <= auto_keep <= MAX_KEEP):
        raise ConfigError(
            f"{path}: auto_keep={shown(auto_keep)} must be null or from {MIN_KEEP} to {MAX_KEEP}"
        )
    for name, value in (("ends_with", ends_with), ("more_distracts", more_distracts)):
        if not isinstance(value, bool):
            raise ConfigError(f"{path}: {name}={shown(value)} must be true or false")
    return Calibration(
        layer=layer,
        heads=None if heads is None else _heads(heads, path, layer, num_heads),
        ends_with=ends_with,
        coverage_bound=float(bound),
        source=str(path),
        is_measured=heads is not None,
        window=window,
        window_bound=float(window_bound),
        auto_keep=auto_keep,
        more_distracts=more_distracts,
        by_meaning=by_meaning,
        is_of_these_weights=None in (weights, read_by) or weights == read_by,
    )


def find_calibration(
    source: str, *, model: str, weights: str | None, norms: str | None = None
) -> Path | None:
    """The file for these weights: beside the model at `source`, in the cache, or shipped.

    A file beside the model counts unless it names other weights. Without a file for these weights
    one is taken of the same model in another quantisation, which has the same `norms`. If weights
    are not read (None), a file is found by the name that `model` had when it was calibrated, or by
    the norms. Files of earlier versions come last.
    """
    beside = Path(source) / FILE
    if beside.is_file() and (weights is None or _field(beside, "weights") in (None, weights)):
        return beside
    first = ("model", model) if weights is None else ("weights", weights)
    fields = [first, ("norms", norms)]
    for name, wanted in fields:
        if wanted is None:
            continue
        files = [path for folder in (_cache(), _SHIPPED) for path in _files_in(folder)]
        found = [path for path in files if _field(path, name) == wanted]
        if found:
            return next((path for path in found if _is_by_meaning(path)), found[0])
    return None


def write_calibration(path: Path, content: dict[str, Any]) -> None:
    """Write `found` to `path`, whole or not at all. Raises `ConfigError`."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ConfigError(f"{path}: cannot be written ({error})") from error


def place_for(source: str, weights: str) -> Path:
    """The path for a new calibration: beside the model, or in the cache if that is read-only.

    Nothing is written to the folders of gemserve or another installed package. `source` "": the
    cache.
    """
    folder = Path(source)
    is_installed = "site-packages" in folder.parts or folder.is_relative_to(
        Path(__file__).parents[1]
    )
    if source and folder.is_dir() and os.access(folder, os.W_OK) and not is_installed:
        return folder / FILE
    return _cache() / f"{weights}.json"


def _text_of(path: Path) -> str:
    """Raises `OSError` and `ValueError`, also for a pipe, which nobody may ever write to."""
    if not path.is_file():
        raise OSError("there is no file")
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise ValueError(f"has {size:,} bytes, the limit is {_MOST_BYTES:,}")
    return path.read_text("utf-8")


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(base)) / "gemserve" / "calibrations"


def _files_in(folder: Path) -> list[Path]:
    """The calibrations in a folder; none if it may not be looked into."""
    try:
        return sorted(folder.glob("*.json"))
    except OSError:
        return []


def _is_by_meaning(path: Path) -> bool:
    """Whether a file is not of an earlier version, whose probes all had the question's words."""
    return "recall" in _content(path)


def _field(path: Path, name: str) -> str | None:
    """A text in a calibration file; None where there is none."""
    value = _content(path).get(name)
    return value if isinstance(value, str) else None


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text_of(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _heads(given: object, path: Path, layer: int, num_heads: int) -> tuple[tuple[int, int], ...]:
    def is_pair(pair: object) -> bool:
        return (
            isinstance(pair, list)
            and len(pair) == 2
            and all(isinstance(n, int) and not isinstance(n, bool) for n in pair)
            and 0 <= pair[0] <= layer
            and 0 <= pair[1] < num_heads
        )

    if not isinstance(given, list) or not given or not all(map(is_pair, given)):
        raise ConfigError(
            f"{path}: heads={shown(given)} must be a list of [layer, head] pairs, layers from 0 to "
            f"{layer} and heads from 0 to {num_heads - 1}"
        )
    pairs = cast(list[list[int]], given)
    return tuple((pair[0], pair[1]) for pair in pairs)
