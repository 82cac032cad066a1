"""Looking after runs: configurations, pictures, tables and cluster jobs. Nothing here imports torch but the benchmark."""
