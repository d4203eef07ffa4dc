"""What several gateways in front of the same workers tell each other, over Redis."""
