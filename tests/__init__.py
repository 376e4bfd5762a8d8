"""Tests of apsi_inspect; `python -m tests` runs all of them."""
