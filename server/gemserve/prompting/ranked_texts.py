"""Documents and a query as tokens: what a filter reads to say how relevant each document is.

Each text is tokenized alone, so a document has the same tokens whatever stands beside it, and the
document cache finds it again. A control token that a text spells is plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemserve.contract.prompt_parts import TextBreaks, TokenArray
from gemserve.prompting.control_tokens import spell_out
from gemserve.prompting.encoding import TokenLimit, encode, token_edges
from gemserve.prompting.segment_anchor import segment_anchor, segment_end
from gemserve.prompting.text_breaks import find_breaks
from gemserve.prompting.word_places import find_word_places

# Between a document and the query; and between two documents when words are looked for, so that
# none spans both.
_GAP = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedTexts:
    """Documents, one behind the other, and the query.

    `ids`: of all documents. `ranges`: the half-open range of each document's tokens, which may be
    empty. `breaks`: places in `ids`. `query`: see `query_ids`. `end`: those of the chat template
    behind a question. `anchor`: what each document is read behind. `words`: for each word of the
    query the tokens of the documents that it begins in.
    """

    ids: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    breaks: TextBreaks
    query: tuple[int, ...]
    end: tuple[int, ...]
    anchor: tuple[int, ...]
    words: tuple[TokenArray, ...]


def query_ids(tokenizer: Any, query: str) -> tuple[int, ...]:
    """What is read behind a document: the query, after a blank line; nothing if it is blank."""
    return tuple(_plain(tokenizer, _GAP + query).ids) if query.strip() else ()


def ranked_texts(
    tokenizer: Any,
    query: str,
    documents: Sequence[str],
    limit: TokenLimit | None = None,
    most_each: int | None = None,
) -> RankedTexts:
    """Documents and a query.

    `limit`: of the tokens of all documents; raises `RequestError` if there are more. `most_each`:
    of one document; what is behind is left out.
    """
    asked = query_ids(tokenizer, query)
    ids: list[int] = []
    ranges: list[tuple[int, int]] = []
    starts = []  # characters, in the text of all documents
    texts: list[tuple[int, str]] = []
    at = 0
    for document in documents:
        encoding = _plain(tokenizer, document, limit)
        edges, kept = token_edges(encoding)[0], encoding.ids[:most_each]
        if len(kept) < len(edges):
            document = document[: int(edges[len(kept)])]
        ranges.append((len(ids), len(ids) + len(kept)))
        ids += kept
        starts.append(edges[: len(kept)] + at)
        texts.append((at, document))
        at += len(document) + len(_GAP)
        if limit is not None:
            limit.check(len(ids), is_least=True)
    all_starts = np.concatenate([np.zeros(0, dtype=np.int64), *starts])
    text = "".join(document + _GAP for _, document in texts)
    # the query stands behind the documents, as one more token, which is no place in them
    asked_at = ((len(ids), len(ids) + 1),)
    words = find_word_places(text + query, np.append(all_starts, len(text)), asked_at)
    return RankedTexts(
        ids=tuple(ids),
        ranges=tuple(ranges),
        breaks=find_breaks(texts, all_starts),
        query=asked,
        end=segment_end(tokenizer),
        anchor=segment_anchor(tokenizer),
        words=tuple(places[places < len(ids)] for places in words),
    )


def having_query(texts: RankedTexts, query: Sequence[int]) -> RankedTexts:
    """The same documents with another query, whose words are not looked for."""
    return replace(texts, query=tuple(query), words=())


def _plain(tokenizer: Any, text: str, limit: TokenLimit | None = None) -> Any:
    encoding = encode(tokenizer, text, add_special_tokens=False, limit=limit)
    return spell_out(tokenizer, text, encoding, [(0, 0, len(text))])
