"""The index shared between gateways through Redis or Valkey; absent where one process suffices.

The only room of the core that imports redis. Nothing here is ever awaited by a request.
"""
