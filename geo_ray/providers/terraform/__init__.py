"""What Terraform made, read from its outputs."""
