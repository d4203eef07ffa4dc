"""Replay a trace on a simulated fleet with the product's own routing: ``warmlane replay``."""
