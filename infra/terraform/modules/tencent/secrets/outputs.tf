output "names" {
  description = "How nodes find their secrets."
  value = {
    store           = "tencent-ssm"
    region          = var.region
    token           = tencentcloud_ssm_secret.token.secret_name
    tls_certificate = try(tencentcloud_ssm_secret.tls["certificate"].secret_name, null)
    tls_key         = try(tencentcloud_ssm_secret.tls["key"].secret_name, null)
    tls_ca          = try(tencentcloud_ssm_secret.tls["ca"].secret_name, null)
  }
}

output "readable" {
  description = "Input of the module identity."
  value = [
    for name in concat([tencentcloud_ssm_secret.token.secret_name], [for secret in tencentcloud_ssm_secret.tls : secret.secret_name]) : { region = var.region, name = name }
  ]
}
