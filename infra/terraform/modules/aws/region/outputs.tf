output "network" {
  description = "Network of the region, input of the links."
  value = {
    vpc_id         = module.network.vpc_id
    cidr           = module.network.cidr
    route_table_id = module.network.route_table_id
  }
}

output "public_subnet" {
  value = module.network.public_subnet
}

output "head_subnet" {
  description = "Subnet of the head if this region has it."
  value = {
    id   = values(module.network.subnets)[0]
    cidr = values(module.network.subnet_cidrs)[0]
    zone = keys(module.network.subnets)[0]
  }
}

output "head_security_group_ids" {
  value = [module.security.nodes, module.security.head]
}

output "role_arn" {
  description = "Role of the nodes, which the renting role must be allowed to pass."
  value       = module.identity.role_arn
}

output "place" {
  description = "Description of the region for `geo-ray inventory --from-terraform` and `geo-ray up --provider terraform`."
  value = {
    cloud    = "aws"
    at       = data.aws_region.here.name
    machines = var.machines
    server   = var.server
    data     = "s3://${module.data.name}?region=${data.aws_region.here.name}"
    pools    = var.pools
    groups   = module.workers.groups
    aws = {
      image_id           = var.image_id
      subnets            = module.network.subnets
      security_group_ids = [module.security.nodes]
      instance_profile   = module.identity.profile
      volume_gb          = var.volume_gb
      root_device        = var.root_device
    }
    tencent = null
  }
}
