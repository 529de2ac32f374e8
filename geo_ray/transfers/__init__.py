"""Who may send to the averager next: order on the bottleneck, bounded staleness, helper regions."""
