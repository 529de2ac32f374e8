# One region without the head: network, security groups, data, machines and their permissions.

data "aws_region" "here" {}

locals {
  name = "${var.name}-${var.region}"
  join = merge(var.secrets.names, { address = var.head_address, python = var.python })
}

module "network" {
  source = "../network"

  name          = local.name
  cidr          = var.cidr
  zones         = var.zones
  nat           = var.nat
  public_subnet = var.public_subnet
}

module "security" {
  source = "../security"

  name           = local.name
  vpc_id         = module.network.vpc_id
  cluster_cidrs  = var.cluster_cidrs
  operator_cidrs = var.operator_cidrs
}

module "data" {
  source = "../bucket"

  name          = local.name
  purpose       = "data"
  force_destroy = var.force_destroy
}

module "identity" {
  source = "../identity"

  name         = var.name
  kind         = "nodes-${var.region}"
  cluster      = var.cluster
  secret_arns  = var.secrets.arns
  kms_key_arns = [var.secrets.kms_key_arn, module.data.kms_key_arn, var.runs.kms_key_arn]
  bucket_arns  = [module.data.arn]
  runs         = { arn = var.runs.arn, region = var.region }
}

module "workers" {
  source = "../ray_workers"

  name               = local.name
  region             = var.region
  pools              = var.pools
  image_id           = var.image_id
  subnets            = module.network.subnets
  security_group_ids = [module.security.nodes]
  instance_profile   = module.identity.profile
  join               = local.join
  volume_gb          = var.volume_gb
  root_device        = var.root_device
  tags               = var.tags
}
