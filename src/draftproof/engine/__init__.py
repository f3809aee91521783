"""The engine: one request's text, one round, the controller of the depth, and what admits, batches and steps."""
