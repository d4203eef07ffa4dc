"""What runs beside the requests: watches, event feeds, prompt readers."""
