"""Verifiers: from a known answer and a completion's text to right or wrong.

Rewards (±1) and advantages are made from the 0/1 correctness elsewhere.
"""
