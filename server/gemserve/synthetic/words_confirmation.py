"""The natural vocabulary that confirms what calibration chose. No other one shares an entry."""

from __future__ import annotations

from gemserve.synthetic.vocabulary import Vocabulary, load_vocabulary

CONFIRMATION: Vocabulary = load_vocabulary("words_confirmation")
