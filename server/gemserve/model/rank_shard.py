"""Describes the part of a model that one rank of several has: a share of each layer's heads.

transformers divides the weights (tensor parallelism): a rank's projections give the queries, keys
and values of its heads, and the outputs of all ranks' heads are summed. So each rank stores the
keys and values of its own key heads only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gemserve.cost import ModelShape
from gemserve.errors import ConfigError, ModelError
from gemserve.model.families.config_check import STATE_LAYERS
from gemserve.model.shape import decoder_path, follow, layers_of

_DIVIDED = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShard:
    """Rank `rank` of `num_ranks`. The ranks have the heads one after another, all equally many.

    `num_heads`, `num_kv_heads`: of this rank. `weights`: a hash of the whole model's weights.
    """

    rank: int
    num_ranks: int
    num_heads: int
    num_kv_heads: int
    weights: str

    def local(self, shape: ModelShape) -> ModelShape:
        """The geometry of what this rank computes; `shape` is the whole model's."""
        return replace(shape, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)

    def heads_of(self, rank: int) -> slice:
        """The query heads of a rank, among all of the model's."""
        return slice(rank * self.num_heads, (rank + 1) * self.num_heads)

    def kv_heads_of(self, rank: int) -> slice:
        """The key heads of a rank, among all of the model's."""
        return slice(rank * self.num_kv_heads, (rank + 1) * self.num_kv_heads)


def check_divisible(config: Any, num_ranks: int) -> None:
    """Raise `ConfigError` if the model of that config cannot be divided among `num_ranks` ranks."""
    given = f"tensor_parallel={num_ranks}"
    if set(getattr(config, "layer_types", None) or ()) & set(STATE_LAYERS):
        raise ConfigError(f"{given}: not for models whose layers keep a recurrent state; must be 1")
    plan = getattr(config, "base_model_tp_plan", None) or {}
    divided = {key.rsplit(".", 1)[-1]: style for key, style in plan.items() if "self_attn." in key}
    if any(divided.get(name) != style for name, style in _DIVIDED.items()):
        raise ConfigError(
            f"{given}: transformers does not divide the heads of models of type "
            f"{config.model_type}; must be 1"
        )
    heads = config.num_attention_heads
    if getattr(config, "is_heterogeneous", False):
        raise ConfigError(
            f"{given}: the layers of models of type {config.model_type} differ in their heads; "
            "must be 1"
        )
    for count, kind in (
        (getattr(config, "num_key_value_heads", None) or heads, "key heads"),
        (heads, "query heads"),
    ):
        if count % num_ranks:
            raise ConfigError(
                f"{given}: the model's {count} {kind} cannot be shared equally by {num_ranks} ranks"
            )


def shard_of(model: Any, *, rank: int, num_ranks: int, weights: str) -> RankShard:
    """The shard that a model loaded by this rank is. Raises `ModelError` if it is not divided.

    The heads are counted in the tensors that are here: a config has those of the whole model.
    """
    config = model.config
    layers = layers_of(follow(model, decoder_path(model, config.num_hidden_layers)))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    counts = set()
    for layer in layers:
        query, key = (getattr(layer.self_attn, name).weight for name in ("q_proj", "k_proj"))
        if not hasattr(query, "to_local") or not hasattr(key, "to_local"):
            raise ModelError(f"tensor_parallel={num_ranks}: transformers has not divided a layer")
        counts.add((len(query.to_local()) // head_dim, len(key.to_local()) // head_dim))
    if len(counts) != 1:
        raise ModelError(f"tensor_parallel={num_ranks}: layers with different numbers of heads")
    ((num_heads, num_kv_heads),) = counts
    return RankShard(
        rank=rank,
        num_ranks=num_ranks,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        weights=weights,
    )
