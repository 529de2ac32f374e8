output "address" {
  description = "Address at which nodes and drivers reach the head."
  value       = "${local.address}:${local.port}"
}

output "instance_id" {
  value = tencentcloud_instance.this.id
}

output "instance_type" {
  value = var.instance_type
}
