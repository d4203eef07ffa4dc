"""Warm-up: documents and prefixes are computed on workers before their users come, with proof.

``items`` reads what an operator wants warm, ``shareable`` finds the tokens that requests will
share, ``plan`` decides which worker gets what, ``run`` sends it politely, ``verify`` proves it.
``keep`` does the same by itself for workers whose cache became empty.
"""
