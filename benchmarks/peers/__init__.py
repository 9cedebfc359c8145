"""The same work on other systems, side by side: `make bench-peers`."""
