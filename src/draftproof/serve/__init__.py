"""A server with the OpenAI API: control of speculation per request, and numbers that mean something."""
