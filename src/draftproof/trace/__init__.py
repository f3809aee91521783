"""The record of what happened, where it goes, and what is read from it."""
