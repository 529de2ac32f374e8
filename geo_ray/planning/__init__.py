"""What should run where and how often it should speak. Pure, and without torch."""
