"""The vocabulary of `near_misses`: relations with room for ten facts of one form in a document.

It shares no wording and no subject with the three vocabularies of `natural_facts`.
"""

from __future__ import annotations

from gemserve.synthetic.vocabulary import Vocabulary, load_vocabulary

NEAR_MISSES: Vocabulary = load_vocabulary("words_near_misses")
