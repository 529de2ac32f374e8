output "address" {
  description = "Where nodes and drivers find it."
  value       = "${local.address}:${local.port}"
}

output "instance_id" {
  value = aws_instance.this.id
}

output "instance_type" {
  value = var.instance_type
}
