# Secrets with which a node of this cloud joins: Ray's token, which is not in Terraform's state, and
# names for Ray's TLS.

locals {
  # The newest version is the greatest one, as in geo_ray.
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

# Empty: fill them with your certificates.
resource "tencentcloud_ssm_secret" "tls" {
  for_each = var.tls ? toset(["certificate", "key", "ca"]) : toset([])

  secret_name             = "geo-ray-${var.name}-tls-${each.key}"
  description             = "Ray's TLS of the cluster ${var.name}: ${each.key}"
  recovery_window_in_days = var.recovery_days
  tags                    = var.tags
}
