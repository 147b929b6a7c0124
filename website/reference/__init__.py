"""Pages that are made from the code each time the site is built. None of them is kept."""
