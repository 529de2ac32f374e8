# What a node of this cloud needs to join: Ray's token, written without being kept in Terraform's
# state, and names for Ray's TLS.

locals {
  # The newest version is the greatest one, as geo_ray has it.
  version = format("v%020d", var.token_version)
}

resource "tencentcloud_ssm_secret" "token" {
  secret_name             = "geo-ray-${var.name}-token"
  description             = "Token of the Ray cluster ${var.name}"
  recovery_window_in_days = var.recovery_days
  tags                    = var.tags
}

resource "tencentcloud_ssm_secret_version_v2" "token" {
  secret_name      = tencentcloud_ssm_secret.token.secret_name
  version_id       = local.version
  secret_string_wo = var.token
}

# Empty: certificates are yours to make.
resource "tencentcloud_ssm_secret" "tls" {
  for_each = var.tls ? toset(["certificate", "key", "ca"]) : toset([])

  secret_name             = "geo-ray-${var.name}-tls-${each.key}"
  description             = "Ray's TLS of the cluster ${var.name}: ${each.key}"
  recovery_window_in_days = var.recovery_days
  tags                    = var.tags
}
