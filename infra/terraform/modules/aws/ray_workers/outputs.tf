output "groups" {
  description = "Name of the group of each pool."
  value       = { for name, group in aws_autoscaling_group.this : name => group.name }
}

output "counts" {
  description = "Machines of each pool."
  value       = { for name, pool in var.pools : name => pool.count }
}
