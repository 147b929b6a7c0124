"""Whether a prompt is cheaper to read whole than to filter, with what the cache has. No torch."""

from __future__ import annotations

from gemserve.cost import ModelShape
from gemserve.engine.cache.document_cache import DocumentCache
from gemserve.engine.reuse.lookup import Answering, find_source
from gemserve.engine.reuse.segments import num_cached_tokens
from gemserve.engine.sequence.sequence import LiveSequence

_ANSWER_TOKENS = 128  # expected of an answer that may be longer


def is_cheaper_whole(
    cache: DocumentCache, sequence: LiveSequence, answering: Answering, shape: ModelShape
) -> bool:
    """Does the cache have so much of the prompt as all layers read it that the rest costs less?

    Counted are the operations up to the first token, and those of the answer's attention. The
    sequence is one that may be read whole and has not begun.
    """
    num_tokens, plan = sequence.num_prompt, sequence.plan
    with sequence.as_whole():
        source = find_source(cache, sequence, answering)
    if source is None:
        return False
    whole = shape.prefill_chunk(source.count, num_tokens - source.count)
    answer = min(_ANSWER_TOKENS, sequence.request.sampling.max_tokens)
    whole += answer * (shape.step_attention(num_tokens) - shape.step_attention(plan.num_kept))
    filtered = shape.prefill_chunk(0, plan.num_kept)
    if whole < filtered:
        return True
    assert plan.layer is not None
    if sequence.segment_pass is not None:
        cached = num_cached_tokens(cache, sequence)
        filtered += sequence.segment_pass.flops(shape, cached, sequence.segment_pass.num_tokens)
    else:
        source = find_source(cache, sequence, answering)
        count = 0 if source is None else source.count
        filtered += shape.filter_chunk(count, num_tokens - count, plan.layer)
    return whole < filtered
