"""Chooses what the tokens of a draft attend to, as published for speculative prefill.

A small model reads all of a prompt by all of its layers and answers with a few tokens. A prompt's
token scores by the attention of these: smoothed over neighbours, the largest over layers and heads,
the mean over the answer's tokens. Chunks of the prompt are kept, those with the best mean first
(Liu et al., Speculative Prefill, 2025, section 3). Published is that tokens keep their positions;
here they are read from position 0 on, as all other methods' are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from gemserve.calibration.search.example import Example
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import load_for
from gemserve_lab.methods_compared import filled

LOOK_AHEAD = 8  # tokens of the draft's answer
CHUNK = 32
_SMOOTHED = 13  # neighbouring tokens


class DraftAttention:
    """A draft model with the tokenizer of the model that answers."""

    def __init__(self, model: str) -> None:
        settings = EngineConfig(filter_method="none", calibrate="off")
        self._model: Any = load_for(ModelConfig(model=model), settings).model.hf.eval()

    @torch.inference_mode()
    def __call__(self, tokenizer: Any, example: Example, keep: int) -> tuple[int, ...]:
        ids = list(example.prompt.ids)
        scores = self._scores(torch.tensor([ids]))
        starts = range(0, len(ids), CHUNK)
        means = torch.tensor([float(scores[s : s + CHUNK].mean()) for s in starts])
        best = means.argsort(descending=True).tolist()
        ranked = (p for i in best for p in range(starts[i], min(starts[i] + CHUNK, len(ids))))
        return filled(example, ranked, keep)

    def _scores(self, ids: torch.Tensor) -> torch.Tensor:
        """How much each token of a prompt counts: [tokens]. `ids`: [1, tokens]."""
        num_tokens, config = ids.shape[1], self._model.config
        config._attn_implementation = "sdpa"
        out = self._model(ids, use_cache=True, logits_to_keep=1)
        config._attn_implementation = "eager"  # which gives the attention
        steps = []
        for _ in range(LOOK_AHEAD):
            token = out.logits[:, -1:].argmax(-1)
            out = self._model(
                token, past_key_values=out.past_key_values, use_cache=True, output_attentions=True
            )
            found = [layer[0, :, 0, :num_tokens].float() for layer in out.attentions]
            smooth = F.avg_pool1d(
                torch.cat(found),
                _SMOOTHED,
                stride=1,
                padding=_SMOOTHED // 2,
                count_include_pad=False,
            )
            steps.append(smooth.amax(0))
        return torch.stack(steps).mean(0)
