"""The books of the KV pool: which block holds what, and who may touch it."""
