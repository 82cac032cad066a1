"""Looking after runs: configurations, pictures, tables, cluster jobs. Only the benchmark imports torch."""
