"""Makes the site from the pages of `docs` and from the code: `make docs`."""
