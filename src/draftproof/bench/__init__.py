"""Measuring: what machine it was, runs in pairs, cells of a table. Knows engines only through what a run returned."""
