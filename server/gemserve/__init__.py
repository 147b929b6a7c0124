"""gemserve: answers over very long prompts, generated from the tokens that matter."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("gemserve")  # written when it was installed, from the git tag
except PackageNotFoundError:  # the sources are on the path, and nothing is installed
    __version__ = "0+unknown"
