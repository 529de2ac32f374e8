"""Plans what runs where and how often regions exchange updates. Pure, and without torch."""
