# One region without the head: network, security groups, data, machines and their permissions.

locals {
  name = "${var.name}-${var.region}"
}

module "network" {
  source = "../network"

  name  = local.name
  cidr  = var.cidr
  zones = var.zones
  tags  = var.tags
}

module "security" {
  source = "../security"

  name          = local.name
  cluster_cidrs = var.cluster_cidrs
  tags          = var.tags
}

module "data" {
  source = "../bucket"

  name          = local.name
  purpose       = "data"
  force_destroy = var.force_destroy
  tags          = var.tags
}

module "identity" {
  source = "../identity"

  name    = var.name
  kind    = "nodes-${var.region}"
  cluster = var.cluster
  secrets = var.secrets.readable
  buckets = [{ region = var.at, name = module.data.name }]
  tags    = var.tags
}

module "workers" {
  source = "../ray_workers"

  name               = local.name
  region             = var.region
  pools              = var.pools
  spot_max_prices    = var.spot_max_prices
  image_id           = var.image_id
  vpc_id             = module.network.vpc_id
  subnets            = module.network.subnets
  security_group_ids = [module.security.nodes]
  role               = module.identity.role
  join               = merge(var.secrets.names, { address = var.head_address, python = var.python })
  disk_gb            = var.disk_gb
  tags               = var.tags
}
