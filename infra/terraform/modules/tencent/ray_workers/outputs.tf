output "machines" {
  description = "The cloud's name of each machine."
  value       = { for name, machine in tencentcloud_instance.this : name => machine.id }
}
