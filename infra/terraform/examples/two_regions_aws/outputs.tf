output "geo_ray" {
  description = "Description of the stack for `geo-ray inventory --from-terraform` and `geo-ray up --provider terraform`."
  value = {
    version  = 1
    stack    = var.name
    cluster  = local.cluster
    head     = { region = "us", address = module.head.address, machine = module.head.instance_id, type = module.head.instance_type }
    secrets  = { aws = module.secrets.names, tencent = null }
    runs     = "s3://${module.runs.name}/runs?region=us-east-1"
    clusters = local.clusters == null ? null : "${local.clusters.folder}${local.clusters.query}"
    places   = { us = module.us.place, eu = module.eu.place }
  }
}
