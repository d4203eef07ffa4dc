"""Who used how much, and what each worker's cache saves: for bills, autoscaling and scale-down."""
