"""The disk tier: blocks in packed segment files, verified on every read."""
