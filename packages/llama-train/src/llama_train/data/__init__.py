"""From documents to batches: `prepare` writes token shards, training reads rows of them."""
