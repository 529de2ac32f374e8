# User data of Terraform's machines, for any cloud: the same text as that of machines that geo_ray
# rents (geo_ray/cloud/boot_script.py; a test compares the two). It contains only names of secrets.

locals {
  tls = [for each in [
    { variable = "RAY_TLS_SERVER_CERT", secret = var.join.tls_certificate },
    { variable = "RAY_TLS_SERVER_KEY", secret = var.join.tls_key },
    { variable = "RAY_TLS_CA_CERT", secret = var.join.tls_ca },
  ] : each if each.secret != null]
  keys    = try(var.serves.keys_secret, null) == null ? [] : [{ variable = "AWS_SHARED_CREDENTIALS_FILE", secret = var.serves.keys_secret }]
  secrets = concat([{ variable = "RAY_AUTH_TOKEN_PATH", secret = var.join.token }], local.tls, local.keys)
  labels  = join(",", [for key in sort(keys(var.labels)) : "${key}=${var.labels[key]}"])

  begin = templatefile("${path.module}/begin.sh.tftpl", {
    cloud    = var.cloud
    join     = var.join
    secrets  = local.secrets
    uses_tls = length(local.tls) > 0
  })
  rest = var.state_device == null ? templatefile("${path.module}/node.sh.tftpl", {
    cloud  = var.cloud
    join   = var.join
    labels = local.labels
    }) : templatefile("${path.module}/head.sh.tftpl", {
    device = var.state_device
    port   = split(":", var.join.address)[1]
    labels = local.labels
    state  = try(var.serves.state, null)
  })
}
