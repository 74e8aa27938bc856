"""A run: from the request to the run directory."""
