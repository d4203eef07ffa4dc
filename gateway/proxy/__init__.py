"""The client surface and one request's way through it."""
