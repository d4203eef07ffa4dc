"""The operator's warm-up: a manifest of documents, the gateway's warm endpoint, proof of warmth.

Speaks to the gateway over HTTP alone; imports neither the gateway nor a runner.
"""
