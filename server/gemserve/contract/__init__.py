"""What passes between API and engine, as frozen data."""
