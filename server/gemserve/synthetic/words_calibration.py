"""The natural vocabulary that calibration chooses by. No other one shares an entry with it."""

from __future__ import annotations

from gemserve.synthetic.vocabulary import Vocabulary, load_vocabulary

CALIBRATION: Vocabulary = load_vocabulary("words_calibration")
