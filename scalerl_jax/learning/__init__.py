"""The update side: batches, optimiser and the jitted train step."""
