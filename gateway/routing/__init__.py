"""Choose a worker: read the prompt, match, price, charge, learn. No HTTP."""
