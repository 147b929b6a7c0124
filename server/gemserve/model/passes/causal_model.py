"""A transformers causal LM as the engine sees it: forward passes over chunks of sequences."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from gemserve.cost import ModelShape, filter_units
from gemserve.errors import ModelError
from gemserve.model.adapter import NO_ADAPTER, Adapter, shifted_layers
from gemserve.model.families.config_check import find_context_tokens
from gemserve.model.families.prepared_layers import prepare
from gemserve.model.families.reach import Reach, find_reaches, windowed_layers
from gemserve.model.passes.attention import (
    ATTENTION_NAME,
    PLAIN,
    Breaks,
    ChunkRows,
    ChunksOfOnePass,
    ForwardContext,
    Group,
    grouped,
    register,
)
from gemserve.model.passes.float32_check import float32_tree, num_layers_of_all_kinds
from gemserve.model.passes.kv import DecodeBatch, DecodeStep, KVSpan, Memory, ReadOnlyKV
from gemserve.model.passes.offload import HostLayers
from gemserve.model.passes.query_tap import FilterLayerReached, FilterTap, QueryTap
from gemserve.model.passes.recurrent_state import (
    PassStates,
    SequenceState,
    StateLayout,
    StateMemory,
    find_states,
)
from gemserve.model.passes.rope import KeyRotation, RotaryFactory, find_key_rotation
from gemserve.model.passes.transfer import to_device
from gemserve.model.rank_shard import RankShard
from gemserve.model.shape import (
    attention_of,
    decoder_path,
    follow,
    layers_of,
    list_name,
    shape_of,
)
from gemserve.model.shared_tree import replaced, with_modules
from gemserve_kernels import select_backend

_KEY_TOLERANCE = 0.05  # error as a share of the largest number; half precision has 8 to 11 bits


class Step(Protocol):
    """Computes decode steps without the layers."""

    def takes(self, adapter: Adapter) -> bool:
        """Whether it can compute rows with this adapter."""
        ...

    def __call__(
        self, step: DecodeStep, rope_tokens: Sequence[int], adapters: Sequence[Adapter]
    ) -> torch.Tensor:
        """The logits [sequences, vocab], float32. The other arguments have one for each row."""
        ...


class CausalModel:
    """Weights, geometry and three passes: `filter_chunk`, `prefill_chunk` and `decode`.

    There is no state between calls: a sequence's state is in its `KVSpan` and `QueryTap`, and in a
    `SequenceState` if layers keep one (`has_states`). `states`: what such a state consists of.
    `host`: the upper layers whose weights are in host memory, if any. `shard`: which heads this
    process has of a model that several hold together; None: it has them all. `shape` is that of the
    whole model either way.
    """

    def __init__(
        self,
        model: Any,
        *,
        host: HostLayers | None = None,
        attention_backend: str | None = None,
        shard: RankShard | None = None,
        reaches: tuple[Reach, ...] | None = None,
    ) -> None:
        """`reaches`: what `find_reaches` has found in a model without states; None: it is called
        here.

        Raises `ValueError` if the backend of that name cannot be used with this model, and
        `ModelError` if the model cannot be served.
        """
        register()
        model.eval().requires_grad_(False)
        self.config: Any = model.config
        self.config._attn_implementation = ATTENTION_NAME
        self.hf = model
        self._path = decoder_path(model, self.config.num_hidden_layers)
        self._decoder = follow(model, self._path)
        prepare(layers_of(self._decoder))
        self._host = host
        self._layers = self._filter_layers = self._runnable_layers()
        self._rotary = RotaryFactory(getattr(self._decoder, "rotary_emb", None))
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.shape: ModelShape = shape_of(model, self.dtype)
        self.shard = shard
        self._local_shape = self.shape if shard is None else shard.local(self.shape)
        self.states = StateLayout({}) if reaches is not None else find_states(model)
        self.reaches = reaches or find_reaches(model, self._local_shape, self.states.layers)
        seen = [reach.limit for reach in self.reaches], windowed_layers(self.reaches)
        self.shape = self.shape.with_limits(*seen)
        self._local_shape = self._local_shape.with_limits(*seen)
        self.backend = select_backend(
            self.device,
            name=attention_backend,
            dtype=self.dtype,
            head_dim=self.shape.head_dim,
        )
        self.vocab_size: int = self.config.vocab_size
        self.context_tokens = find_context_tokens(self.config)
        self._rotates_keys: dict[int, bool] = {}  # results by layer, for the layers tried so far
        self._step: Step | None = None

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    @property
    def has_states(self) -> bool:
        """Whether layers keep a recurrent or convolutional state of a sequence."""
        return bool(self.states.parts)

    @property
    def is_rope_fixed(self) -> bool:
        """Whether a position is rotated alike whatever the sequence's length."""
        return self._rotary.is_fixed

    @property
    def reads_together(self) -> bool:
        """Whether several texts are read in one pass: a GPU's kernels want many rows."""
        return self.device.type == "cuda" and not self.has_states

    @property
    def has_reusable_beginnings(self) -> bool:
        """Whether a prompt can go on from keys and values of another one that begins like it.

        A state is that behind the last token only, so it is not there for a shorter beginning.
        """
        return self.is_rope_fixed and not self.has_states

    @property
    def unscaled_tokens(self) -> int | None:
        """The longest sequence that has the factors of the original context.

        None: there is one set for all lengths.
        """
        return self._rotary.switch

    @property
    def learned_positions(self) -> int | None:
        """How many positions the model has in a table. None: it computes them."""
        for name, module in self._decoder.named_children():
            if isinstance(module, nn.Embedding) and ("position" in name or name == "wpe"):
                return int(self.config.max_position_embeddings)
        if hasattr(self._decoder, "pos_encoding"):  # CTRL's table
            return int(self.config.max_position_embeddings)
        return None

    def window_of(self, layer: int) -> int | None:
        """The most tokens that a token sees in `layer`. None: the layer sees all tokens."""
        return self.reaches[layer].limit

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """The most tokens that a token sees in each layer: see `window_of`."""
        return tuple(map(self.window_of, range(self.num_layers)))

    @property
    def num_host_layers(self) -> int:
        """How many upper layers have their weights in host memory."""
        return 0 if self._host is None else self.num_layers - self._host.first

    def variant(self, hf: Any) -> CausalModel:
        """The same model over another tree of modules of the same shape.

        Its filter passes run that tree's own layers, whatever `with_filter_layers` was given
        before.
        """
        clone = copy.copy(self)
        clone.hf, clone._decoder, clone._step = hf, follow(hf, self._path), None
        clone._layers = clone._filter_layers = clone._runnable_layers()
        return clone

    def in_float32(self) -> CausalModel:
        """The lowest layers that have one of every kind, and computations in float32.

        It is for comparisons only. Layers that rest on the host are not in it.
        """
        count = num_layers_of_all_kinds(layers_of(self._decoder), self.reaches)
        if self._host is not None:
            count = min(count, self._host.first)
        clone = copy.copy(self)
        clone.hf = float32_tree(self.hf, self._path, count)
        clone.states = self.states.in_float32()
        clone._decoder, clone._host, clone._step = follow(clone.hf, self._path), None, None
        clone._layers = clone._filter_layers = clone._runnable_layers()
        clone.dtype, head_dim = torch.float32, self.shape.head_dim
        clone.backend = select_backend(self.device, dtype=clone.dtype, head_dim=head_dim)
        return clone

    def key_mover(
        self, layer: int, num_tokens: int
    ) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """The function that moves keys of `layer` in a sequence: see `KeyRotation.moved`.

        It is None if moved keys differ from those that the layer itself has at the other position,
        for example because it has no rotary embedding. Every layer is tried once, on a few tokens.
        """
        if layer not in self._rotates_keys:
            self._rotates_keys |= self._try_key_rotation(layer)
        if not self._rotates_keys[layer]:
            return None
        rotation = self._key_rotation(layer, num_tokens)
        return None if rotation is None else rotation.moved

    def _key_rotation(self, layer: int, num_tokens: int) -> KeyRotation | None:
        rotary = self._rotary.replacement([num_tokens]).get(
            "rotary_emb", getattr(self._decoder, "rotary_emb", None)
        )
        kinds = getattr(self.config, "layer_types", None)
        attention = attention_of(self._layers[layer])
        return find_key_rotation(attention, rotary, None if kinds is None else kinds[layer])

    @torch.inference_mode()
    def _try_key_rotation(self, layer: int) -> dict[int, bool]:
        """Whether keys of each layer up to `layer` can be moved.

        The trial's text repeats one token, so that a layer's keys differ only by their positions.
        """
        count = 8
        kv = self.filter_pass_of([self.vocab_size // 2] * count, layer)
        shifts = torch.arange(count, device=self.device)
        moves: dict[int, bool] = {}
        for index in range(layer + 1):
            rotation = self._key_rotation(index, count)
            rotated = kv.keys(index, count).float()
            if rotation is None:
                moves[index] = False
                continue
            try:
                moved = rotation.moved(rotated[:, :1].expand_as(rotated), shifts)
            except (TypeError, RuntimeError, ValueError, AttributeError, IndexError):
                moves[index] = False  # this model's rotation takes other arguments
                continue
            error = (moved - rotated).abs().max() / rotated.abs().max().clamp_min(1e-6)
            moves[index] = float(error) < _KEY_TOLERANCE
        return moves

    def lower_layers(self, filter_layer: int) -> list[nn.Module]:
        """The layers that filter passes run: 0 to `filter_layer`."""
        return list(self._layers)[: filter_layer + 1]

    def with_filter_layers(self, layers: nn.ModuleList) -> CausalModel:
        """The same model, but its filter passes run `layers` instead of its lowest ones."""
        clone = copy.copy(self)
        clone._filter_layers = layers
        return clone

    def with_step(self, step: Step) -> CausalModel:
        """The same model, but `step` computes decode steps of rows whose adapters it takes."""
        clone = copy.copy(self)
        clone._step = step
        return clone

    def steps(self, adapter: Adapter) -> bool:
        """Whether decode steps of rows with this adapter need no layers.

        They may then have any such adapters, also those that replace the model.
        """
        return self._step is not None and self._step.takes(adapter)

    def rotary_of(self, rope_tokens: Sequence[int]) -> Any:
        """The rotary embedding of rows whose sequences have these final lengths."""
        changed = self._rotary.replacement(rope_tokens)
        return changed.get("rotary_emb", getattr(self._decoder, "rotary_emb", None))

    def runnable(self) -> nn.Module:
        """The transformers model. Layers that rest on the host are copied in when needed."""
        return self._with_decoder({})

    @contextmanager
    def attention_named(self, name: str) -> Iterator[None]:
        """Run the attention function registered under `name` in place of gemserve's."""
        before, self.config._attn_implementation = self.config._attn_implementation, name
        try:
            yield
        finally:
            self.config._attn_implementation = before

    def with_adapter(self, adapter: Adapter, rope_tokens: int) -> nn.Module:
        """The transformers model with what the adapter adds before layers."""
        return self._whole_model([rope_tokens], [adapter])

    def new_memory(self, num_units: int) -> Memory:
        """Memory for keys and values; one unit holds one token's K or V in one layer."""
        return Memory(num_units, self._local_shape, self.dtype, self.device)

    def new_states(self, count: int) -> StateMemory:
        """Memory for the recurrent states of `count` sequences."""
        return StateMemory(self.states, count, self.device)

    def new_query_tap(self, layers: Sequence[int], rows: Sequence[int]) -> QueryTap:
        """Room for the queries of the tokens at positions `rows`, in each of `layers`."""
        shape = self._local_shape
        size = (len(layers), shape.num_heads, len(rows), shape.head_dim)
        queries = torch.empty(size, dtype=self.dtype, device=self.device)
        return QueryTap(layers=tuple(layers), rows=tuple(rows), queries=queries)

    @torch.inference_mode()
    def filter_chunk(
        self,
        ids: Sequence[int],
        *,
        start: int,
        kv: KVSpan,
        tap: FilterTap,
        adapter: Adapter = NO_ADAPTER,
        breaks: Breaks | None = None,
        state: SequenceState | None = None,
    ) -> None:
        """Run a chunk through layers 0..r−1, and compute q and k of layer r = `tap.layer`.

        `kv` has room for `filter_units(r)` units of each token. `state`: see `prefill_chunk`.
        """
        rows = ChunkRows(kv=kv, start=start)
        positions = _positions(start, len(ids), adapter)
        states = self._pass_states(state, start, breaks)
        self._filter(ids, positions, rows, tap, adapter, breaks, states)

    @torch.inference_mode()
    def filter_together(
        self,
        texts: Sequence[tuple[Sequence[int], KVSpan]],
        *,
        tap: FilterTap,
        adapter: Adapter = NO_ADAPTER,
        breaks: Breaks | None = None,
    ) -> None:
        """Run several texts, each from position 0 on, through the filter layers in one pass.

        None sees another. Each comes with room for its keys and values: see `filter_chunk`.
        """
        assert not self.has_states
        chunks = tuple(ChunkRows(kv=kv, start=0) for _, kv in texts)
        counts = tuple(len(ids) for ids, _ in texts)
        rows = ChunksOfOnePass(chunks=chunks, counts=counts, is_one_call=True)
        positions = [p for ids, _ in texts for p in _positions(0, len(ids), adapter)]
        together = [token for ids, _ in texts for token in ids]
        self._filter(together, positions, rows, tap, adapter, breaks, None)

    @torch.inference_mode()
    def ask_segments(
        self,
        ids: Sequence[int],
        *,
        segments: Sequence[tuple[KVSpan, int]],
        tap: FilterTap,
        adapter: Adapter = NO_ADAPTER,
        breaks: Breaks | None = None,
        num_before: int = 0,
        state: SequenceState | None = None,
    ) -> None:
        """Run `ids` through the filter layers behind each of several segments, in one pass.

        A segment is its keys and values, and how many tokens it has; there is room for `ids` behind
        them. The tap's rows are numbered through: those behind the second segment begin at
        `len(ids)`. `num_before`: how many segments other passes have asked before. `state`: that
        behind the segment, which is the only one then.
        """
        assert not self.has_states or (state is not None and len(segments) == 1)
        chunks = tuple(ChunkRows(kv=kv, start=count) for kv, count in segments)
        positions = [p for _, count in segments for p in _positions(count, len(ids), adapter)]
        counts = (len(ids),) * len(chunks)
        rows = ChunksOfOnePass(
            chunks=chunks,
            counts=counts,
            start=num_before * len(ids),
            is_one_call=self.reads_together,
        )
        states = self._pass_states(state, segments[0][1], breaks)
        self._filter([*ids] * len(segments), positions, rows, tap, adapter, breaks, states)

    def _filter(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        rows: ChunkRows | ChunksOfOnePass,
        tap: FilterTap,
        adapter: Adapter,
        breaks: Breaks | None,
        states: PassStates | None,
    ) -> None:
        context = self._context(rows, adapter, breaks, filter_tap=tap)
        decoder = self._lower_decoder(tap, adapter)
        try:
            decoder(**self._inputs(ids, positions, states), context=context)
        except FilterLayerReached:
            if states is not None:
                states.commit()
            return
        raise ModelError(f"{type(self._decoder).__name__}: layer {tap.layer} never attended")

    def filter_pass_of(self, ids: Sequence[int], layer: int) -> KVSpan:
        """The keys and values of a filter pass of its own over a few tokens, up to `layer`."""
        num_tokens, num_units = len(ids), filter_units(self.shape.kv_index(layer))
        memory = self.new_memory(num_units * num_tokens)
        kv = memory.pass_kv(0, num_units=num_units, capacity=num_tokens)
        queries = self.new_query_tap([layer], [num_tokens - 1])
        tap = FilterTap(layer=layer, queries=queries, num_tokens=num_tokens)
        self.filter_chunk(ids, start=0, kv=kv, tap=tap)
        return kv

    @torch.inference_mode()
    def queries_of(
        self,
        ids: Sequence[int],
        *,
        start: int,
        kv: KVSpan,
        layers: Sequence[int],
        length: int,
        adapter: Adapter = NO_ADAPTER,
    ) -> QueryTap:
        """The queries in `layers` of tokens start… that were read before. Nothing is stored.

        `kv` has the keys and values of these and of no later tokens. `length`: of the whole
        sequence at its longest.
        """
        queries = self.new_query_tap(layers, range(start, start + len(ids)))
        tap = FilterTap(layer=max(layers), queries=queries, num_tokens=length)
        read_only = ReadOnlyKV(kv, start + len(ids))
        self.filter_chunk(ids, start=start, kv=read_only, tap=tap, adapter=adapter)
        return queries

    @torch.inference_mode()
    def prefill_chunk(
        self,
        ids: Sequence[int],
        *,
        start: int,
        kv: KVSpan,
        rope_tokens: int,
        is_last: bool,
        is_scored: bool = False,
        query_tap: QueryTap | None = None,
        adapter: Adapter = NO_ADAPTER,
        breaks: Breaks | None = None,
        state: SequenceState | None = None,
    ) -> torch.Tensor | None:
        """Run all layers on a chunk. Returns its last token's logits [1, vocab] if `is_last`.

        If `is_scored`, it returns the logits of every token, [tokens, vocab]. `rope_tokens`: the
        sequence's final length with its adapter's positions, for rope that depends on length.
        `query_tap` gets the queries that it collects. `state`: the sequence's, which is that behind
        token `start`−1, and is then that behind the chunk; a model without states needs none, and
        a pass that begins at 0 and is not continued neither.
        """
        states = self._pass_states(state, start, breaks)
        wanted = range(len(ids)) if is_scored else [len(ids) - 1] if is_last else []
        self._expect_host_layers()
        out = self._whole_model([rope_tokens], [adapter])(
            **self._inputs(ids, _positions(start, len(ids), adapter), states),
            context=self._context(
                ChunkRows(kv=kv, start=start), adapter, breaks, query_tap=query_tap
            ),
            # an index tensor, because the integer 0 would mean "all tokens"
            logits_to_keep=to_device(wanted, torch.long, self.device),
        )
        if states is not None:
            states.commit()
        return out.logits[0].float() if wanted else None

    @torch.inference_mode()
    def decode(
        self,
        ids: Sequence[int],
        batch: DecodeBatch,
        rope_tokens: Sequence[int],
        adapters: Sequence[Adapter] | None = None,
    ) -> torch.Tensor:
        """Run one token of each of several sequences: logits [sequences, vocab], float32."""
        adapters = adapters or [NO_ADAPTER] * len(ids)
        pairs = zip(batch.positions, adapters, strict=True)
        positions = [position + adapter.num_positions for position, adapter in pairs]
        numbers = to_device(batch.numbers(ids, positions), torch.long, self.device)
        step = DecodeStep.over(numbers, batch.memory, batch.longest)
        if self._step is not None and all(map(self._step.takes, adapters)):
            return self._step(step, rope_tokens, adapters)
        self._expect_host_layers()
        states = PassStates(batch.states, is_fresh=False) if self.has_states else None
        logits = self.step_logits(
            step,
            self._whole_model(rope_tokens, adapters),
            grouped(adapters, self.device),
            states,
        ).float()
        if states is not None:
            states.commit()
        return logits

    def step_logits(
        self,
        step: DecodeStep,
        whole: nn.Module | None = None,
        groups: Sequence[Group] = PLAIN,
        states: PassStates | None = None,
    ) -> torch.Tensor:
        """The logits of a decode step, in the model's dtype: [sequences, vocab].

        `whole`: the model that the sequences' adapters and lengths require.
        """
        ids, positions = step.ids, step.positions
        if states is not None:  # these layers take each sequence as a row of the batch
            ids, positions = ids.T, positions.T
        out = (whole or self.hf)(
            **self._arguments(ids, positions, states),
            context=ForwardContext(
                rows=step.spans,
                windowed_rows=step.window_spans,
                backend=self.backend,
                reaches=self.reaches,
                groups=groups,
                kv_place=self.shape.kv_place,
            ),
        )
        logits: torch.Tensor = out.logits.flatten(0, 1)
        return logits

    def _context(
        self,
        rows: ChunkRows | ChunksOfOnePass,
        adapter: Adapter,
        breaks: Breaks | None,
        **taps: Any,
    ) -> ForwardContext:
        pauses: dict[str, Any] = {}
        if breaks is not None:
            pauses = {"pause": breaks.pause, "piece": breaks.piece}
        groups = [Group(adapter)]
        return ForwardContext(
            rows=rows,
            backend=self.backend,
            reaches=self.reaches,
            groups=groups,
            **pauses,
            **taps,
        )

    def _pass_states(
        self, state: SequenceState | None, start: int, breaks: Breaks | None
    ) -> PassStates | None:
        """What a chunk's pass has as its cache, if layers keep states."""
        if not self.has_states or state is None:
            assert not self.has_states or start == 0, "a pass goes on from a state that it lacks"
            return None
        pause = None if breaks is None else breaks.pause
        return PassStates([state], is_fresh=start == 0, pause=pause)

    def _inputs(
        self, ids: Sequence[int], positions: Sequence[int], states: PassStates | None
    ) -> dict[str, Any]:
        numbers = to_device([*ids, *positions], torch.long, self.device).view(2, 1, -1)
        return self._arguments(numbers[0], numbers[1], states)

    def _arguments(
        self, ids: torch.Tensor, positions: torch.Tensor, states: PassStates | None
    ) -> dict[str, Any]:
        """The arguments of a forward pass. `ids`, `positions`: [1, rows], int64.

        With the states of several sequences they are [sequences, 1].
        """
        arguments: dict[str, Any] = {
            "input_ids": ids,
            "position_ids": positions,
            "use_cache": False,
        }
        if states is not None:
            arguments["past_key_values"] = states
        elif getattr(self.config, "attn_temperature_tuning", None):
            arguments["past_key_values"] = PositionsAsCache(positions[0])
        return arguments

    def _expect_host_layers(self) -> None:
        if self._host is not None:
            self._host.expect()

    def _runnable_layers(self) -> nn.ModuleList:
        layers = layers_of(self._decoder)
        return layers if self._host is None else self._host.bind(list(layers))

    def _lower_decoder(self, tap: FilterTap, adapter: Adapter) -> nn.Module:
        layers = nn.ModuleList(list(self._filter_layers)[: tap.layer + 1])
        shifted = shifted_layers(layers, [adapter])
        rotary = self._rotary.replacement([tap.num_tokens + adapter.num_positions])
        return with_modules(self._decoder, {list_name(self._decoder): shifted or layers, **rotary})

    def _whole_model(self, rope_tokens: Sequence[int], adapters: Sequence[Adapter]) -> nn.Module:
        shifted = shifted_layers(self._layers, adapters)
        changes = self._rotary.replacement(rope_tokens)
        if shifted is not None:
            changes[list_name(self._decoder)] = shifted
        return self._with_decoder(changes)

    def _with_decoder(self, changes: dict[str, nn.Module]) -> nn.Module:
        """The transformers model with some of its decoder's children replaced."""
        if self._host is not None:
            changes = {list_name(self._decoder): self._layers, **changes}
        return replaced(self.hf, self._path, changes) if changes else self.hf


class PositionsAsCache:
    """Tells layers the positions of their rows, where transformers' layers ask their cache.

    Llama 4 scales queries by their positions, which it takes to be as many as the cache has tokens,
    and further ones. This cache has no tokens: `positions`, [rows], less the row's number.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        rows = torch.arange(len(positions), device=positions.device)
        self._before = positions - rows

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        return self._before

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value


def _positions(start: int, count: int, adapter: Adapter) -> range:
    return range(start + adapter.num_positions, start + adapter.num_positions + count)
