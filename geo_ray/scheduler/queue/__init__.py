"""The live queue of a shared cluster: jobs of tenants, decided at each scheduling tick."""
