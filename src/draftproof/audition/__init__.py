"""Logs of traffic: reading them, and (without running the target) what a drafter would have guessed on them."""
