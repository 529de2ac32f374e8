output "geo_ray" {
  description = "Description of the stack for `geo-ray inventory --from-terraform` and `geo-ray up --provider terraform`."
  value = {
    version  = 1
    stack    = var.name
    cluster  = local.cluster
    head     = { region = "eu", address = module.head.address, machine = module.head.instance_id, type = module.head.instance_type }
    secrets  = { aws = module.secrets.names, tencent = module.tencent_secrets.names }
    runs     = "s3://${module.runs.name}/runs?region=eu-central-1"
    clusters = local.clusters == null ? null : "${local.clusters.folder}${local.clusters.query}"
    places   = { eu = module.eu.place, sg = module.sg.place, jp = module.jp.place }
  }
}

output "tunnel_ends" {
  description = "Public address of each end of the tunnels."
  value       = { eu = module.eu_tunnel.address, sg = module.sg_tunnel.address, jp = module.jp_tunnel.address }
}
