"""Where workers come from: a file, DNS or Kubernetes, beside those of the configuration."""
