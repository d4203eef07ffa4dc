"""Why prefixes miss: what broke them, where, and how many tokens that cost."""
