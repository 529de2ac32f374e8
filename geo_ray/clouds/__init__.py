"""What clouds offer and ask for it: price records, their tiers, snapshots and how to renew them."""
