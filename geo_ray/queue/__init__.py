"""The live queue: jobs of a shared cluster, decided about at slots' borders; pure but its store."""
