"""gemserve: answers over very long prompts, generated from the tokens that matter."""

from __future__ import annotations

__version__ = "0.1.0"
