"""The client port's connections: the shape of one exchange, and the gateway's own HTTP front."""
