"""Decides how a prompt is filtered, from the request, the server's defaults and the calibration.

The API, the engine, `ask` and `eval` all call the planner; nothing else decides how a prompt is
filtered. A plan is made once, before the request is queued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from gemserve.calibration.files import Calibration
from gemserve.config import (
    DEFAULT_KEEP,
    DEFAULT_METHOD,
    find_segment_size,
    is_distracted,
    nearest_seeing,
)
from gemserve.contract.filter_options import (
    AUTO_MIN_KEEP,
    BESIDE_SEGMENT,
    FAR_FROM_END,
    MAX_QUESTION_TOKENS,
    NO_PROTECT,
    FilterMethod,
    FilterOptions,
    FilterParams,
    Heads,
    Keep,
    SegmentSize,
    parse_heads,
)
from gemserve.contract.filter_plan import Budget, FilterPlan, FilterReason, Segment, SegmentPlan
from gemserve.contract.prompt_parts import SHORT_TURN, ProtectedRange, TextBreaks, TokenArray
from gemserve.contract.requests import Request
from gemserve.cost import ModelShape
from gemserve.errors import NotCalibrated, RequestError, shown
from gemserve.filtering.methods import METHODS, SERVED_METHODS, Method, find_method
from gemserve.filtering.protected_budget import count_always_read, count_first
from gemserve.filtering.reading_plans import ReaderPlans
from gemserve.filtering.segment_cuts import cut_segments, document_ranges

_END_TOKENS = 64  # of a prompt without a question, that are read behind each segment
_SEVERAL_SHARE = 1 / 4  # of the documents, if several passages answer alike
_END_ROWS = 16  # of these, that are watched
_MOST_BEHIND = 16  # tokens after a question that are watched, too
_LEAST_SEGMENT = 16  # tokens of a document that is read with a query
_READS_DOCUMENTS = DEFAULT_METHOD  # the method whose heads rank documents


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterPlanner:
    """The settings that a server filters with. Any thread may call the methods.

    `method` and `keep` are for requests that name none. Prompts of up to `min_tokens` are read
    whole. `segment_size`: for requests that name none. `reads_cached_whole`: see
    `FilterPlan.may_read_whole`. `fails_open`: a prompt whose filter fails is read whole, too.
    `sliding_windows`: the window of each layer in tokens, None for a layer without one, 0 for a
    layer without attention. `shape`: the model's. `longest_sequence`: tokens of prompt and
    completion that fit if everything is read. `longest_prompt`: the most tokens of a prompt.
    `longest_pass`: of one that is read as one sequence. `reader`: how another model looks at
    prompts for this one, if there is one. `is_reader`: it looks for another model, and with `keep`
    "auto" keeps as many tokens as it may.
    """

    method: FilterMethod
    keep: Keep
    min_tokens: int
    segment_size: SegmentSize
    reads_cached_whole: bool
    fails_open: bool
    calibration: Calibration
    sliding_windows: Sequence[int | None]
    shape: ModelShape
    context_tokens: int
    longest_sequence: int
    longest_prompt: int
    longest_pass: int
    reader: ReaderPlans | None = None
    is_reader: bool = False

    def resolve(self, options: FilterOptions) -> FilterParams:
        """A request's options, completed by the server's defaults.

        Raises `RequestError` naming the option that the method does not have, or the option's
        limit.
        """
        name = options.method or self.method
        method = find_method(name)
        if self._reader_of(options, method) is not None:
            return self._params_of_reader(options, name)
        self._check_layer(options, name)
        if options.pooling is not None and not method.has_pooling:
            owners = self._methods_with(lambda other: other.has_pooling)
            raise RequestError(
                f"filter.pooling={options.pooling}: only {owners} it, not {name}",
                param="filter.pooling",
            )
        if options.window is not None and not method.reads_segments:
            owners = self._methods_with(lambda other: other.reads_segments)
            raise RequestError(
                f"filter.window={options.window}: only {owners} it, not {name}",
                param="filter.window",
            )
        most = self.context_tokens - BESIDE_SEGMENT
        if isinstance(options.window, int) and options.window > most:
            raise RequestError(
                f"filter.window={options.window}: must be at most {most}, {BESIDE_SEGMENT} less "
                "than the model's context",
                param="filter.window",
            )
        if options.lexical is not None and not method.has_words:
            owners = self._methods_with(lambda other: other.has_words)
            raise RequestError(
                f"filter.lexical={options.lexical}: only {owners} it, not {name}",
                param="filter.lexical",
            )
        if options.protect != NO_PROTECT and not method.protects:
            owners = self._methods_with(lambda other: other.protects)
            raise RequestError(
                f"filter.protect: only {owners} it, not {name}", param="filter.protect"
            )
        keep = self.keep if options.keep is None else options.keep
        can_be_auto = method.is_adaptive or method.keeps_everything
        if options.keep is None and keep == "auto" and not can_be_auto:
            keep = DEFAULT_KEEP
        if options.fallback and method.keeps_everything:
            raise RequestError(
                f"filter.fallback=true: method {name} keeps everything", param="filter.fallback"
            )
        layer = self.calibration.layer if options.layer is None else options.layer
        heads = None if options.heads is None else parse_heads(options.heads)
        fallback = options.fallback
        if fallback is None:
            is_measured = self._is_calibrated(layer, heads) and self.calibration.is_measured
            fallback = method.is_adaptive and (keep == "auto" or is_measured)
        params = FilterParams(
            method=name,
            keep=keep,
            fallback=fallback,
            layer=layer,
            heads=heads,
            window=options.window or self.segment_size,
            lexical=options.lexical or ("auto" if method.has_words else "off"),
            may_read_whole=self.reads_cached_whole and leaves_it_open(options),
            awaits_calibration=method.has_layer and self.calibration.is_awaited,
            pooling=options.pooling or "mean",
            return_selection=options.return_selection,
            return_scores=options.return_scores,
            return_attention=options.return_attention,
        )
        if options.return_attention and not method.has_selection:
            raise RequestError(
                f"filter.return_attention=true: not with {name}, whose layers keep different "
                "tokens",
                param="filter.return_attention",
            )
        self._check_adaptive(params)
        self._check_heads(params)
        return params

    def _reader_of(self, options: FilterOptions, method: Method) -> ReaderPlans | None:
        """What plans for the reader, if it looks at the prompt; None: nobody does, or this model.

        Raises `RequestError` if the reader is wanted and there is none, or it would do nothing.
        """
        if options.reader == "reader" and self.reader is None:
            raise RequestError(
                "filter.reader=reader: this server has no reader; --reader names its model",
                param="filter.reader",
            )
        if options.reader == "reader" and method.selector is None:
            owners = self._methods_with(lambda other: other.selector is not None)
            raise RequestError(
                f"filter.reader=reader: only {owners} it, not {options.method or self.method}",
                param="filter.reader",
            )
        return None if options.reader == "self" or method.selector is None else self.reader

    def _params_of_reader(self, options: FilterOptions, name: FilterMethod) -> FilterParams:
        assert self.reader is not None
        keep = self.keep if options.keep is None else options.keep
        if options.keep is None and keep == "auto" and not METHODS[name].is_adaptive:
            keep = DEFAULT_KEEP
        return self.reader.params(replace(options, method=name, keep=keep))

    @property
    def of_documents(self) -> FilterPlanner:
        """The planner of the model that reads documents without a prompt, and libraries.

        A reader with other tokens reads prompts alone.
        """
        has_same = self.reader is not None and self.reader.translate is None
        return self.reader.planner if has_same and self.reader is not None else self

    @property
    def params_of_documents(self) -> FilterParams:
        """How that model filters by default."""
        if self.of_documents is self:
            return self.resolve(FilterOptions(method=_READS_DOCUMENTS, reader="self"))
        params = self.of_documents.resolve(FilterOptions(method=_READS_DOCUMENTS))
        return replace(params, reader="reader")

    def _looking(self, params: FilterParams) -> FilterPlanner:
        """The planner of the model that looks at the prompt."""
        is_reader = self.reader is not None and params.reader == "reader"
        return self.reader.planner if is_reader and self.reader is not None else self

    @property
    def short_message_tokens(self) -> int:
        """Up to how many tokens a chat's last turn is no document.

        What is short as a prompt is short as a part of one.
        """
        return max(SHORT_TURN, self.min_tokens)

    def generated_from(
        self, params: FilterParams, num_tokens: int, num_protected: int, beside: int = 1
    ) -> int:
        """Number of tokens of a prompt of `num_tokens` that the answer is generated from.

        `num_protected`: how many of them are always read, if the method protects any. `beside`:
        tokens of the context that must be left for the answer and an adapter.
        """
        if (looking := self._looking(params)) is not self:
            return looking.generated_from(params, num_tokens, num_protected, beside)
        if METHODS[params.method].evictor is not None:
            return num_tokens
        if self._why_whole(params, num_tokens, num_protected, beside):
            return num_tokens
        return self._kept_count(params, num_tokens, num_protected)

    def check_layer_sees(
        self,
        params: FilterParams,
        protected: Sequence[ProtectedRange],
        num_tokens: int,
        beside: int = 1,
        positions: int = 0,
    ) -> None:
        """Raise `RequestError` if the filter layer cannot see the start of this prompt.

        The same holds for the layers of heads that the request names. `beside`, `positions`: see
        `most_tokens`.
        """
        if (looking := self._looking(params)) is not self:
            looking.check_layer_sees(params, protected, num_tokens, beside)
            return
        num_protected = count_always_read(protected, num_tokens)
        is_whole = self._why_whole(params, num_tokens, num_protected, beside) is not None
        if is_whole or not METHODS[params.method].has_layer:
            return
        size = self._size_if_segmented(params, protected, num_tokens, positions)
        if size is not None:
            num_tokens = min(num_tokens, size + BESIDE_SEGMENT)
        layer = self._layer_of(params)
        advice = "choose another layer or filter: none"
        named = [(layer, "filter.layer", f"filter.layer={layer}: this layer", advice)]
        for layer in sorted({layer for layer, _ in params.heads or ()}):
            advice = "choose heads of other layers"
            named.append((layer, "filter.heads", f"filter.heads: layer {layer}", advice))
        for layer, field, subject, advice in named:
            window = self.sliding_windows[layer]
            if window == 0:
                nearest = nearest_seeing(layer, self.sliding_windows)
                raise RequestError(
                    f"{subject} has no attention; the nearest that have it: {nearest}", param=field
                )
            if window is not None and window < num_tokens:
                raise RequestError(
                    f"{subject} sees only the last {window} tokens of a prompt of {num_tokens}; "
                    f"{advice}",
                    param=field,
                )

    def planned(self, request: Request) -> Request:
        """The request with its plan (see `plan`), and with what the reader does for it."""
        if self.reader is not None and request.filter.reader == "reader":
            return self._read_first(request, self.reader)
        return replace(request, plan=self.plan(request))

    def planned_choices(self, requests: Sequence[Request]) -> tuple[Request, ...]:
        """Requests with their plans. Choices of one prompt share a plan that needs no seed."""
        plans: dict[tuple[int, int | None], Request] = {}
        planned: list[Request] = []
        for request in requests:
            is_seeded = METHODS[request.filter.method].blind is not None
            of = id(request.prompt_ids), request.sampling.seed if is_seeded else None
            if of not in plans:
                plans[of] = self.planned(request)
            planned.append(replace(request, plan=plans[of].plan, reading=plans[of].reading))
        return tuple(planned)

    def plan(self, request: Request) -> FilterPlan:
        """How a request will run: filtered, or whole with a reason. Raises `RequestError`."""
        params, num_tokens = request.filter, len(request.prompt_ids)
        method = find_method(params.method)
        self._check_adaptive(params)
        self._check_heads(params)
        num_protected = count_always_read(request.protected, num_tokens)
        beside = request.sampling.max_tokens + request.adapter_positions
        reason = self._why_whole(params, num_tokens, num_protected, beside)
        if request.prompt_logprobs is not None and not method.keeps_everything:
            reason = "prompt_logprobs"
        budget = self._budget(request, num_protected)
        plan = FilterPlan(
            reason=reason,
            num_kept=num_tokens if reason is not None else budget.high,
            budget=budget,
            fails_open=self.fails_open and self._longest_kept(request) == num_tokens,
            num_stable=count_first(request.protected, num_tokens) if budget.protected else 0,
        )
        is_open = params.may_read_whole and not request.selects_only
        if reason is None and is_open and method.selector is not None:
            plan = plan.having(may_read_whole=num_tokens + beside <= self.longest_sequence)
        if params.return_attention:
            layer = self._layer_of(params)
            plan = plan.having(answer_layer=layer, answer_heads=self._heads_of(params))
        if reason is not None:
            return plan
        if method.selector is not None:
            return self._with_pass(plan, request, method)
        if method.blind is not None:
            seed = request.sampling.seed or 0
            keep = budget.high - budget.protected
            chosen = method.blind.select(num_tokens, request.protected, keep, seed)
            return plan.having(chosen=chosen)
        self._check_evictable(params)
        return plan.having(evicts=True)

    def _read_first(self, request: Request, reader: ReaderPlans) -> Request:
        """The request with its plan, and with what the reader does first."""
        num_tokens = len(request.prompt_ids)
        reading = reader.request(request)
        of_reader = reading.plan
        assert of_reader is not None
        reason = of_reader.reason
        if request.prompt_logprobs is not None:
            reason = "prompt_logprobs"
        budget = of_reader.budget
        if reading.stands_for is not None:  # which counts tokens of another kind
            budget = self._budget(request, count_always_read(request.protected, num_tokens))
        plan = FilterPlan(
            reason=reason,
            num_kept=num_tokens if reason is not None else budget.high,
            budget=budget,
            num_stable=count_first(request.protected, num_tokens) if budget.protected else 0,
        )
        if request.filter.return_attention:
            layer, heads = self.calibration.layer, self.calibration.heads
            plan = plan.having(answer_layer=layer, answer_heads=heads)
        return replace(request, plan=plan, reading=reading if reason is None else None)

    def looking_itself(self, request: Request) -> Request | None:
        """A request whose reader distrusts what it chose, as this model looks at it, with its plan.

        None: nobody knows when this model's own choice is to be trusted, the request names the
        reader's heads or a size of segments, or the prompt is read whole anyway. Raises
        `RequestError` if this model's filter layer does not see the prompt.
        """
        assert self.reader is not None
        params, of_reader = request.filter, self.reader.planner
        is_own = params.layer != of_reader.calibration.layer or params.heads is not None
        if is_own or params.window != of_reader.segment_size or not self.calibration.is_measured:
            return None
        layer, size = self.calibration.layer, self.segment_size
        params = replace(params, reader="self", layer=layer, window=size)
        planned = self.planned(replace(request, filter=params, reading=None))
        plan, num_tokens = planned.plan, len(request.prompt_ids)
        positions = request.adapter_positions
        assert plan is not None
        is_too_long = plan.segments is None and num_tokens > self._longest_behind(positions)
        if plan.reason is not None or is_too_long:
            return None
        beside = request.sampling.max_tokens + positions
        self.check_layer_sees(params, request.protected, num_tokens, beside, positions)
        return planned

    def _with_pass(self, plan: FilterPlan, request: Request, method: Method) -> FilterPlan:
        """The plan of a prompt that goes through the lower layers first."""
        selector, calibration = method.selector, self.calibration
        assert selector is not None
        params, num_tokens = request.filter, len(request.prompt_ids)
        layer, heads = self._layer_of(params), self._heads_of(params)
        is_calibrated = self._is_calibrated(layer, params.heads)
        bound = calibration.coverage_bound if is_calibrated else Calibration.GUESSED_BOUND
        rows = selector.rows(num_tokens, request.question, calibration.ends_with)
        plan = plan.having(
            layer=layer,
            kv_index=self.shape.kv_index(layer),
            num_asked=_num_asked(request),
            tapped=tuple(selector.layers(layer, heads)),
            heads=heads,
        )
        segments = self._segments(request)
        if segments is not None:
            num_asked = len(segments.asked)
            first = 0 if request.question else max(0, num_asked - len(rows))
            return plan.having(
                segments=segments,
                rows=tuple(range(first, num_asked)),
                coverage_bound=calibration.window_bound if is_calibrated else bound,
            )
        repeated: tuple[int, ...] = ()
        if method.repeats_question:
            repeated = self._repeated(request, {layer, *plan.tapped})
        if repeated:  # the question itself is read last
            question = ((num_tokens, num_tokens + len(repeated)),)
            rows = selector.rows(num_tokens + len(repeated), question, False)
        return plan.having(rows=tuple(rows), coverage_bound=bound, repeated=repeated)

    def plan_documents(
        self,
        tokens: TokenArray,
        documents: Sequence[tuple[int, int]],
        breaks: TextBreaks,
        *,
        anchor: tuple[int, ...],
        query: tuple[int, ...],
        end: tuple[int, ...] = (),
        field: str = "query",
        positions: int = 0,
    ) -> tuple[FilterParams, FilterPlan]:
        """How documents are read that are not a prompt, to tell what a query looks at in each.

        `tokens`: of all documents. `documents`: their half-open ranges; each is read in segments of
        its own. `anchor`: what each segment is read behind. `query`: what is asked behind each, of
        which the last `MAX_QUESTION_TOKENS` are watched. `end`: what the chat template has behind a
        question; it is watched, too, if the calibration says so. `positions`: those that an adapter
        takes, if this model reads. Raises `RequestError`, naming the query's `field`, if the
        model's filter layers do not see enough beside it, and `NotCalibrated`.
        """
        if self.calibration.is_awaited:
            raise NotCalibrated
        if self.of_documents is not self:
            _, plan = self.of_documents.plan_documents(
                tokens, documents, breaks, anchor=anchor, query=query, end=end, field=field
            )
            return self.params_of_documents, plan
        params = self.params_of_documents
        layer, heads, calibration = self._layer_of(params), self._heads_of(params), self.calibration
        selector = METHODS[params.method].selector
        assert selector is not None
        asked = query + (end if calibration.ends_with and len(end) <= _MOST_BEHIND else ())
        layers = tuple(selector.layers(layer, heads))
        num_beside = positions + len(anchor) + len(asked)
        size = self._document_segment_size(params, layers, num_beside)
        if size < _LEAST_SEGMENT:
            raise RequestError(
                f"{field}: has {len(query)} tokens, the limit of this model is "
                f"{len(query) + size - _LEAST_SEGMENT}: what its filter layers see must have room "
                "for a part of a document, too",
                param=field,
                code="context_length_exceeded",
            )
        ranges = [each for each in documents if each[0] < each[1]]
        plan = FilterPlan(
            reason=None,
            num_kept=0,
            budget=Budget(low=0, high=0, limit=0),
            layer=layer,
            kv_index=self.shape.kv_index(layer),
            tapped=layers,
            heads=heads,
            rows=tuple(range(max(0, len(query) - MAX_QUESTION_TOKENS), len(asked))),
            segments=SegmentPlan(
                size=size,
                anchor=anchor,
                asked=asked,
                segments=cut_segments(tokens, ranges, breaks, size, anchor),
            ),
        )
        return params, plan

    def _document_segment_size(
        self, params: FilterParams, layers: Sequence[int], num_beside: int
    ) -> int:
        """The most tokens of a segment of a document. `num_beside`: what is read with it.

        The watched rows must see all of it, in all of these layers.
        """
        seen = [self.context_tokens]
        seen += [w for w in (self.sliding_windows[layer] for layer in layers) if w is not None]
        usual = find_segment_size(params.window, self.calibration) or self.calibration.USUAL_SEGMENT
        return min(usual, min(seen) - num_beside)

    def index_plan(
        self, segments: Sequence[Segment], anchor: Sequence[int], size: int
    ) -> FilterPlan:
        """How segments of at most `size` tokens are read whose keys are wanted, and nothing else.

        They are one group. Raises `RequestError` if no heads of the model are known to find facts.
        """
        if self.of_documents is not self:
            return self.of_documents.index_plan(segments, anchor, size)
        reading = SegmentPlan(size=size, anchor=tuple(anchor), asked=(), segments=tuple(segments))
        return self._vectors_plan().having(segments=reading)

    def question_plan(self, request: Request) -> tuple[tuple[int, ...], FilterPlan]:
        """The tokens of a request's question alone, behind the anchor, and how they are read.

        The rows are those that are watched behind segments.
        """
        if self.of_documents is not self:
            return self.of_documents.question_plan(request)
        anchor = request.anchor or tuple(request.prompt_ids[:1])
        asked = self._asked(request)
        rows = _END_ROWS if not request.question else len(asked)
        count = len(anchor) + len(asked)
        return (*anchor, *asked), self._vectors_plan().having(
            tapped=tuple(sorted({layer for layer, _ in self.calibration.heads or ()})),
            rows=tuple(range(max(len(anchor), count - rows), count)),
            num_sinks=len(anchor),
        )

    def _vectors_plan(self) -> FilterPlan:
        calibration = self.calibration
        if calibration.heads is None:
            raise RequestError(
                "filter.library: no heads of this model are known to find facts; run gemserve "
                "calibrate first",
                param="filter.library",
            )
        return FilterPlan(
            reason=None,
            num_kept=1,
            budget=Budget(low=1, high=1, limit=1),
            layer=calibration.layer,
            kv_index=self.shape.kv_index(calibration.layer),
            heads=calibration.heads,
        )

    def most_tokens(
        self,
        params: FilterParams,
        protected: Sequence[ProtectedRange],
        num_tokens: int,
        beside: int = 1,
        positions: int = 0,
    ) -> int | None:
        """The most tokens that a prompt of `num_tokens` may have; None: it is read in segments.

        `beside`: see `generated_from`. `positions`: how many of these the adapter takes.
        """
        num_protected = count_always_read(protected, num_tokens)
        longest = self._longest_behind(positions)
        if (looking := self._looking(params)) is not self:
            most = looking.most_tokens(params, protected, num_tokens, beside)
            reason = looking._why_whole(params, num_tokens, num_protected, beside)
            if most is None or reason is None:
                return None if most is None else min(most, longest)
            return longest
        if self._why_whole(params, num_tokens, num_protected, beside) is not None:
            return longest
        size = self._size_if_segmented(params, protected, num_tokens, positions)
        return longest if size is None else None

    def _size_if_segmented(
        self,
        params: FilterParams,
        protected: Sequence[ProtectedRange],
        num_tokens: int,
        positions: int,
    ) -> int | None:
        """The most tokens of a segment; None: a prompt that is filtered is read as one sequence."""
        size = self._segment_size(params, positions)
        documents = document_ranges(protected, (), num_tokens)
        if size is None or not self._needs_segments(documents, size, num_tokens, positions):
            return None
        return size

    def _longest_behind(self, positions: int) -> int:
        """The most tokens of a pass behind `positions` of an adapter.

        A server that reads beyond the model's context does so with an adapter, too: such a model
        has no table of positions that would end.
        """
        if self.longest_pass > self.context_tokens:
            return self.longest_pass
        return min(self.longest_pass, self.context_tokens - positions)

    def _segment_size(self, params: FilterParams, positions: int = 0) -> int | None:
        """The most tokens of a segment; None: the prompt is read as one sequence.

        Segments begin behind the `positions` of an adapter, and may leave too little beside them.
        """
        size = find_segment_size(params.window, self.calibration)
        if size is None or not METHODS[params.method].reads_segments:
            return None
        size = min(size, self.context_tokens - BESIDE_SEGMENT - positions)
        return None if size < _LEAST_SEGMENT and positions else size

    def _segments(self, request: Request) -> SegmentPlan | None:
        """The segments of a prompt that cannot be read as one sequence, or should not."""
        num_tokens, positions = len(request.prompt_ids), request.adapter_positions
        size = self._segment_size(request.filter, positions)
        if size is None:
            return None
        ranges = document_ranges(request.protected, request.question, num_tokens)
        if not self._needs_segments(ranges, size, num_tokens, positions):
            return None
        anchor, asked = request.anchor or tuple(request.prompt_ids[:1]), self._asked(request)
        room = self.context_tokens - positions - len(anchor) - len(asked)
        excerpts = [(excerpt.start, excerpt.stop) for excerpt in request.excerpts]
        fixed = [each for each in excerpts if each[1] - each[0] <= room]
        return SegmentPlan(
            size=size,
            anchor=anchor,
            asked=asked,
            segments=cut_segments(request.tokens, ranges, request.breaks, size, anchor, fixed),
        )

    def _needs_segments(
        self, documents: Sequence[tuple[int, int]], size: int, num_tokens: int, positions: int
    ) -> bool:
        """Do the documents not fit into one segment, or the whole prompt not into one pass?"""
        has_documents = any(start < stop for start, stop in documents)
        is_long = num_tokens > self._longest_behind(positions) and has_documents
        return is_long or sum(stop - start for start, stop in documents) > size

    def _asked(self, request: Request) -> tuple[int, ...]:
        """What is read behind each segment: the question, and what is watched after it.

        Without a question the prompt's end says what is wanted, and needs words before it.
        """
        num_tokens = len(request.prompt_ids)
        if not request.question:
            return tuple(request.prompt_ids[max(0, num_tokens - _END_TOKENS) :])
        stop = request.question[-1][1]
        ranges = [*request.question]
        if self.calibration.ends_with and num_tokens - stop <= _MOST_BEHIND:
            ranges.append((stop, num_tokens))
        return tuple(i for low, high in ranges for i in request.prompt_ids[low:high])

    def _repeated(self, request: Request, layers: Collection[int]) -> tuple[int, ...]:
        """The tokens of a question in front of its document, if there is room to repeat it.

        All of the pass must be seen in these `layers`.
        """
        num_tokens = len(request.prompt_ids)
        if not request.question:
            return ()
        behind = num_tokens - request.question[0][1]
        behind -= count_always_read(request.protected, num_tokens, request.question[0][1])
        if behind < FAR_FROM_END:
            return ()
        ids = [i for start, stop in request.question for i in request.prompt_ids[start:stop]]
        seen = [w for w in (self.sliding_windows[layer] for layer in layers) if w is not None]
        room = min([self.context_tokens - request.adapter_positions, *seen])
        return tuple(ids) if num_tokens + len(ids) <= room else ()

    def _why_whole(
        self, params: FilterParams, num_tokens: int, num_protected: int, beside: int
    ) -> FilterReason | None:
        """Why a prompt of `num_tokens` is not filtered, or None.

        `beside`: see `generated_from`. Where a prompt leaves less when it is read whole, a filter
        may cost more than it spares: without it, the request could not be answered.
        """
        if METHODS[params.method].keeps_everything:
            return "disabled"
        kept = self._kept_count(params, num_tokens, num_protected)
        of_all = params.kept_count(num_tokens)  # if nothing were protected
        if num_tokens <= max(self.min_tokens, of_all):
            return "short_prompt"
        if params.awaits_calibration:
            return "not_calibrated"
        is_saving = kept < num_tokens and not self._costs_more(params, num_tokens, kept)
        is_needed = kept < num_tokens and num_tokens + beside > self.longest_sequence
        if (
            is_saving
            or is_needed
            or (kept < num_tokens and self._costs_more(params, num_tokens, of_all))
        ):
            return None
        return "mostly_protected"

    def _costs_more(self, params: FilterParams, num_tokens: int, kept: int) -> bool:
        """Are a filter pass, and reading the `kept` tokens, no less work than reading all?"""
        if not METHODS[params.method].has_layer:
            return False
        shape, layer = self.shape, self._layer_of(params)
        size = self._segment_size(params) or num_tokens
        whole, rest = divmod(num_tokens, size)
        reading = whole * shape.filter_chunk(0, size, layer) + shape.filter_chunk(0, rest, layer)
        filtered = reading + shape.prefill_chunk(0, kept)
        return filtered >= shape.prefill_chunk(0, num_tokens)

    def _budget(self, request: Request, num_protected: int) -> Budget:
        """How much a filter may keep, and how much if attention is diffuse.

        Then everything, unless that distracts the model from what it would answer from few tokens.
        """
        params, num_tokens = request.filter, len(request.prompt_ids)
        protected = num_protected if METHODS[params.method].protects else 0
        keep = self._kept_count(params, num_tokens, num_protected)
        longest = self._longest_kept(request)
        budget = Budget(low=keep, high=keep, limit=keep, protected=protected)
        distracts = False
        if params.keep == "auto":
            most = self.calibration.auto_keep
            low = AUTO_MIN_KEEP if most is None else min(AUTO_MIN_KEEP, most // 2)
            if self.is_reader and not is_distracted(self.calibration):
                low = keep - protected
            several = min(DEFAULT_KEEP, math.ceil(_SEVERAL_SHARE * (num_tokens - protected)))
            several = max(keep, min(protected + several, longest))
            budget = replace(budget, low=protected + low, limit=several, several=several)
            distracts = is_distracted(self.calibration)
        if not params.fallback or distracts:
            return budget
        return replace(budget, limit=max(budget.limit, longest))

    def _longest_kept(self, request: Request) -> int:
        """The most tokens of the prompt that the answer can be generated from."""
        used = request.sampling.max_tokens + request.adapter_positions
        return min(len(request.prompt_ids), self.longest_sequence - used)

    def _kept_count(self, params: FilterParams, num_tokens: int, num_protected: int) -> int:
        """Number of tokens to keep of a prompt, with what is always read. With "auto", the most."""
        protected = num_protected if METHODS[params.method].protects else 0
        return protected + self.calibration.most_kept(params.keep, num_tokens - protected)

    def _layer_of(self, params: FilterParams) -> int:
        return self.calibration.layer if params.layer is None else params.layer

    def _heads_of(self, params: FilterParams) -> Heads | None:
        """The heads that score tokens. None: all heads of the filter layer."""
        if params.heads is not None:
            return params.heads
        calibration = self.calibration
        return calibration.heads if self._layer_of(params) == calibration.layer else None

    def _is_calibrated(self, layer: int, heads: Heads | None) -> bool:
        """Does the calibration's bound hold for this filter layer and a request's `heads`?"""
        calibration = self.calibration
        if layer != calibration.layer:
            return False
        return heads is None or set(heads) == set(calibration.heads or ())

    def _check_layer(self, options: FilterOptions, name: FilterMethod) -> None:
        if options.layer is None:
            return
        limit = self.calibration.layer
        if not METHODS[name].has_layer:
            owners = self._methods_with(lambda other: other.has_layer)
            raise RequestError(
                f"filter.layer={options.layer}: only {owners} a filter layer, not {name}",
                param="filter.layer",
            )
        if options.layer > limit:
            raise RequestError(
                f"filter.layer={options.layer}: must be from 0 to this server's filter layer, "
                f"{limit}",
                param="filter.layer",
            )

    def _check_heads(self, params: FilterParams) -> None:
        """Raise `RequestError` for `heads` that the method does not have, or the model."""
        if params.heads is None:
            return
        if not METHODS[params.method].has_heads:
            given = shown([list(pair) for pair in params.heads])
            owners = self._methods_with(lambda other: other.has_heads)
            raise RequestError(
                f"filter.heads={given}: only {owners} it, not {params.method}",
                param="filter.heads",
            )
        last = self._layer_of(params)
        for layer, head in params.heads:
            if layer > last:
                raise RequestError(
                    f"filter.heads: layer {shown(layer)} must be from 0 to the request's filter "
                    f"layer, {last}",
                    param="filter.heads",
                )
            if head >= self.shape.num_heads:
                raise RequestError(
                    f"filter.heads: head {shown(head)} of layer {layer} must be from 0 to "
                    f"{self.shape.num_heads - 1}",
                    param="filter.heads",
                )

    def _check_evictable(self, params: FilterParams) -> None:
        """Raise `RequestError` if a layer has a sliding window, or no attention.

        Kept keys would not be where the window looks for them.
        """
        windows = [w for w in self.sliding_windows if w is not None]
        if 0 in windows:
            raise RequestError(
                f"filter.method={params.method}: not for this model: {windows.count(0)} of its "
                "layers have no attention, and so no keys that could be dropped",
                param="filter.method",
            )
        if windows:
            raise RequestError(
                f"filter.method={params.method}: not for this model: {len(windows)} of its "
                f"layers see only the last {min(windows)} tokens",
                param="filter.method",
            )

    def _check_adaptive(self, params: FilterParams) -> None:
        """Raise `RequestError` for an adaptive `keep` or `fallback` that the method lacks."""
        method = METHODS[params.method]
        if params.is_adaptive and not method.is_adaptive and not method.keeps_everything:
            field = 'keep="auto"' if params.keep == "auto" else "fallback=true"
            owners = self._methods_with(lambda other: other.is_adaptive)
            raise RequestError(
                f"filter.{field}: only {owners} it, not {params.method}",
                param=f"filter.{field.split('=')[0]}",
            )

    def _methods_with(self, has: Callable[[Method], bool]) -> str:
        """The beginning of a sentence about the methods that requests may name and that have this.

        The server's own method comes first.
        """
        names = [name for name in SERVED_METHODS if has(METHODS[name])]
        names.sort(key=lambda name: name != self.method)
        if len(names) == 1:
            return f"method {names[0]} has"
        return f"methods {', '.join(names[:-1])} and {names[-1]} have"


def leaves_it_open(options: FilterOptions) -> bool:
    """Does a request say nothing of how its prompt is filtered, and ask for no selection?"""
    return options == FilterOptions(protect=options.protect)


def _num_asked(request: Request) -> int:
    """How many tokens of the question are not of calls; 0 if none is, or all are."""
    if not request.num_called:
        return 0
    return sum(stop - start for start, stop in request.question) - request.num_called
