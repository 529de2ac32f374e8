output "profile" {
  description = "Name of the instance profile."
  value       = aws_iam_instance_profile.this.name
}

output "role_arn" {
  value = aws_iam_role.this.arn
}
