"""What is generated of the Helm chart: its values' schema and the table in its README."""
