"""The gateway: an OpenAI-compatible proxy that routes each request by what its prefix is worth."""
