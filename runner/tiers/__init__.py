"""KV beneath the device pool: host memory, SSD segments, a remote store, other runners."""
