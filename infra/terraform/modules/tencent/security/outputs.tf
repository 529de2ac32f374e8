output "nodes" {
  description = "Security group of all nodes."
  value       = tencentcloud_security_group.nodes.id
}

output "head" {
  description = "Security group of the head, which also needs that of all nodes."
  value       = tencentcloud_security_group.head.id
}
