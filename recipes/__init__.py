"""How what gemserve ships was made. Run from the repository root; not part of the package."""
