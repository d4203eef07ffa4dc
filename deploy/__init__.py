"""What is deployed beside the package: images, compose, and generators of the chart's files."""
