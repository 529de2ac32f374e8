"""Cloud prices: price records, tiers, the price book, and queries that refresh it."""
