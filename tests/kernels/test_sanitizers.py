"""`make test-sanitizers` would find mistakes of compiled code: two that are made on purpose."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    "-fsanitize=" not in os.environ["CXX"], reason="not compiled with sanitizers"
)
BLOCKS = """
import torch
from gemserve_kernels.blocks import FORMATS, Blocks
made = Blocks(FORMATS[4], torch.zeros(16 * 34, dtype=torch.uint8), 16, 32)
"""


@pytest.mark.parametrize(
    ("mistake", "report"),
    [
        ("made.numbers(torch.float32, 0, 32)", "AddressSanitizer: heap-buffer-overflow"),
        ("made._call('block_products', 0, 1 << 60, 0, 0, 0, 1)", "signed integer overflow"),
    ],
)
def test_a_mistake_is_reported(mistake: str, report: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", BLOCKS + mistake], capture_output=True, text=True, timeout=300
    )
    assert found.returncode != 0
    assert report in found.stderr
