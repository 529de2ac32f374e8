output "machines" {
  description = "Id of each machine."
  value       = { for name, machine in tencentcloud_instance.this : name => machine.id }
}
