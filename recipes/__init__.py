"""How things that gemserve ships were made. Run from the repository root; no part of the package."""
