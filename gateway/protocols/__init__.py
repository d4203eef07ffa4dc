"""The client APIs as tables and pure functions: surfaces, error shapes, translations."""
