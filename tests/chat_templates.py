"""Tokenizers with chat templates of the published formats, written for these tests.

Each is the built-in tokenizer with a family's control tokens and a template that frames, trims and
refuses messages as the family's own does.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "chat_templates"
CONTROL_TOKENS: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "gemma3": ("<start_of_turn>", "<end_of_turn>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "mistral": ("[INST]", "[/INST]"),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "qwen2": ("<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>"),
}
FAMILIES = tuple(CONTROL_TOKENS)
_HARMONY = ("start", "end", "message", "channel", "constrain", "call", "return")
_DEEPSEEK = ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep")
# further families, which are here for how they write calls
CONTROL_TOKENS |= {
    "qwen3_coder": ("<|im_start|>", "<|im_end|>"),
    "glm": ("<|user|>", "<|assistant|>", "<|observation|>"),
    "deepseek_r1": tuple(f"<｜{name}｜>" for name in (*_DEEPSEEK, "end▁of▁sentence")),
    "deepseek_v31": tuple(f"<｜{name}｜>" for name in (*_DEEPSEEK, "end▁of▁sentence")),
    "mistral_list": ("[INST]", "[/INST]", "[TOOL_CALLS]"),
    "mistral_args": ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    "gpt_oss": tuple(f"<|{name}|>" for name in _HARMONY),
}
ALTERNATING = ("gemma3", "mistral")  # they refuse other orders of roles, tool messages among them


def shaped_like(tokenizer: Any, family: str) -> Any:
    """A copy of the built-in tokenizer with the control tokens and the template of `family`."""
    copied = copy.deepcopy(tokenizer)
    copied.add_special_tokens({"additional_special_tokens": list(CONTROL_TOKENS[family])})
    if family.startswith("qwen"):
        copied.add_tokens(["<think>", "</think>", "<tool_response>", "</tool_response>"])
    copied.chat_template = (FOLDER / f"{family}.jinja").read_text()
    return copied
