"""Another configuration for a gateway that runs: what changes, what stays, and when it is read."""
