output "script" {
  description = "User data of the machine."
  value       = local.script
}
