"""The natural vocabulary of `gemserve eval`. No other one shares an entry with it."""

from __future__ import annotations

from gemserve.synthetic.vocabulary import Vocabulary, load_vocabulary

EVALUATION: Vocabulary = load_vocabulary("words_evaluation")
