"""Whether speculation will pay: what a log says is accepted, and what rounds cost here, put together."""
