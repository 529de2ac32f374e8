# Secrets with which a node joins: Ray's token, and names for Ray's TLS. The cloud generates the
# token; it is not in Terraform's state.

resource "aws_kms_key" "this" {
  description             = "${var.name} secrets"
  enable_key_rotation     = true
  deletion_window_in_days = 7
  tags                    = { Name = "${var.name} secrets" }
}

ephemeral "aws_secretsmanager_random_password" "token" {
  password_length     = 64
  exclude_punctuation = true
}

resource "aws_secretsmanager_secret" "token" {
  name                    = "geo-ray/${var.name}/token"
  description             = "Token of the Ray cluster ${var.name}"
  kms_key_id              = aws_kms_key.this.arn
  recovery_window_in_days = var.recovery_days
  tags                    = { Name = "${var.name} token" }
}

resource "aws_secretsmanager_secret_version" "token" {
  secret_id                = aws_secretsmanager_secret.token.id
  secret_string_wo         = ephemeral.aws_secretsmanager_random_password.token.random_password
  secret_string_wo_version = var.token_version
}

# Empty: fill them with your certificates (`aws secretsmanager put-secret-value`).
resource "aws_secretsmanager_secret" "tls" {
  for_each = var.tls ? toset(["certificate", "key", "ca"]) : toset([])

  name                    = "geo-ray/${var.name}/tls-${each.key}"
  description             = "Ray's TLS of the cluster ${var.name}: ${each.key}"
  kms_key_id              = aws_kms_key.this.arn
  recovery_window_in_days = var.recovery_days
  tags                    = { Name = "${var.name} tls-${each.key}" }
}
