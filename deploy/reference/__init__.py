"""Pages of docs/reference/, written from the code itself: ``python -m deploy.reference``."""
