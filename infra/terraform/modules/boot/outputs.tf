output "script" {
  description = "For the user data."
  value       = "${local.begin}${local.rest}"
}
