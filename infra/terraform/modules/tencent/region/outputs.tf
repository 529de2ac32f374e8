output "network" {
  description = "Network of the region, input of the links."
  value = {
    vpc_id         = module.network.vpc_id
    cidr           = module.network.cidr
    route_table_id = module.network.route_table_id
    public_subnet  = module.network.public_subnet
    at             = var.at
  }
}

output "role" {
  description = "Role of the nodes, which the renting role must be allowed to pass."
  value       = module.identity.role
}

output "place" {
  description = "Description of the region for `geo-ray inventory --from-terraform` and `geo-ray up --provider terraform`."
  value = {
    cloud    = "tencent"
    at       = var.at
    machines = var.machines
    server   = var.server
    data     = "s3://${module.data.name}?endpoint_url=https://cos.${var.at}.myqcloud.com&region=${var.at}&addressing=virtual"
    pools    = var.pools
    groups   = {}
    aws      = null
    tencent = {
      image_id           = var.image_id
      vpc_id             = module.network.vpc_id
      subnets            = module.network.subnets
      security_group_ids = [module.security.nodes]
      role               = module.identity.role
      disk_gb            = var.disk_gb
    }
  }
}
