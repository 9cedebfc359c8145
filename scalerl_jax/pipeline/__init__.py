"""The asynchronous pipeline: the schedule, the transport and the loop.

Imports floors 0 to 3. What a run saves and reports is not here (`run/`).
"""
