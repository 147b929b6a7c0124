"""Load test of any OpenAI-compatible server, over its streaming HTTP interface.

    load.py --url http://127.0.0.1:8000 --requests 200 --concurrency 1,8,32 --out result
    load.py --url http://127.0.0.1:8000 --requests 500 --rate 2,4 --prompt-tokens 4096~512
    load.py --compare before/result.json after/result.json --out compared

The same as `gemserve-client load`.
"""

from __future__ import annotations

import sys

from gemserve_client.load_test.command import main

if __name__ == "__main__":
    sys.exit(main(program="python benchmarks/load.py"))
