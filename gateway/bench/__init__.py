"""``warmlane bench``: what clients of a gateway, or of any OpenAI server, get to see."""
