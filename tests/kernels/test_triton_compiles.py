"""Every Triton kernel compiles for a GPU and fits one, found out without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.kernels.twins import twin

KERNELS = {
    f"{module.__name__.rpartition('.')[2]}.{name}"
    for module in map(
        twin,
        (
            "triton_decode",
            "triton_kv_copy",
            "triton_ntk",
            "triton_parts",
            "triton_pooling",
            "triton_attention_scores",
        ),
    )
    for name in vars(module)
    if name.endswith("_kernel")
}
SHARED = 99 << 10  # bytes a block may have where there is least: compute capability 8.6


def test_every_kernel_compiles_and_fits(tmp_path: Path) -> None:
    script = Path(__file__).with_name("compiled.py")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    for capability in (86, 90):
        names = {name for at, _, _, name, *_ in made if at == capability}
        assert names == {kernel.partition(".")[2] for kernel in KERNELS}
    assert {kernel[3]: kernel for kernel in made if kernel[4] > SHARED} == {}
    # only the interpreter needs float32 blocks: a GPU must multiply halves as halves
    widened = {name for _, dtype, _, name, _, has_tf32 in made if dtype == "bfloat16" and has_tf32}
    assert widened == {"_merge_kernel"}  # whose features are float32
