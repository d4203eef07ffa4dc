"""Whether it pays to keep KV in a lower tier, for whom, and how much of a prompt may go there."""
