"""Raw keep-alive connections to one worker."""
