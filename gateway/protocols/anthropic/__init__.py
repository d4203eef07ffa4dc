"""Anthropic's messages API, translated for engines that speak only OpenAI's chat API.

``to_chat`` makes the request, ``to_message`` the answer, ``MessageStream`` a streamed answer. What
cannot be said in the other API is refused where leaving it out would change what is asked, and left
out otherwise; ``docs/protocols.md`` lists both.

Source: Anthropic's API reference, "Messages" and "Streaming"; OpenAI's, "Chat completions".
"""

from gateway.protocols.anthropic.answer import to_message
from gateway.protocols.anthropic.request import check_max_tokens, is_messages, to_chat
from gateway.protocols.anthropic.stream import MessageStream

__all__ = ["MessageStream", "check_max_tokens", "is_messages", "to_chat", "to_message"]
