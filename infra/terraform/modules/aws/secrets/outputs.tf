data "aws_region" "here" {}

output "names" {
  description = "How nodes find their secrets."
  value = {
    store           = "aws-secretsmanager"
    region          = data.aws_region.here.name
    token           = aws_secretsmanager_secret.token.name
    tls_certificate = try(aws_secretsmanager_secret.tls["certificate"].name, null)
    tls_key         = try(aws_secretsmanager_secret.tls["key"].name, null)
    tls_ca          = try(aws_secretsmanager_secret.tls["ca"].name, null)
  }
}

output "arns" {
  value = concat([aws_secretsmanager_secret.token.arn], [for secret in aws_secretsmanager_secret.tls : secret.arn])
}

output "kms_key_arn" {
  value = aws_kms_key.this.arn
}

output "token_id" {
  description = "Secret of the token, after it has a value."
  value       = aws_secretsmanager_secret_version.token.secret_id
}
