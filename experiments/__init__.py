"""One file a figure or study; each returns a `Config` from `get_config()`."""
