# Two regions of AWS with a private link. The head is in us.

locals {
  cluster = coalesce(var.cluster, var.name)
  cidrs   = { us = "10.20.0.0/16", eu = "10.21.0.0/16" }
  # Folder of the cluster of `geo-ray up --provider terraform`, if the head may rent.
  clusters = var.rents ? { folder = "s3://${module.runs.name}/clusters", query = "?region=us-east-1" } : null
}

module "secrets" {
  source    = "../../modules/aws/secrets"
  providers = { aws = aws.us }

  name = var.name
  tls  = var.tls
}

module "runs" {
  source    = "../../modules/aws/bucket"
  providers = { aws = aws.us }

  name          = var.name
  purpose       = "runs"
  force_destroy = !var.protected
}

module "spending" {
  source    = "../../modules/aws/spending"
  providers = { aws = aws.us }

  name          = var.name
  cluster       = local.cluster
  usd_per_month = var.usd_per_month
  emails        = var.emails
}

module "us" {
  source    = "../../modules/aws/region"
  providers = { aws = aws.us }

  name           = var.name
  cluster        = local.cluster
  region         = "us"
  cidr           = local.cidrs.us
  cluster_cidrs  = values(local.cidrs)
  nat            = var.nat
  operator_cidrs = var.operator_cidrs
  secrets        = module.secrets
  runs           = module.runs
  head_address   = module.head.address
  image_id       = var.image_ids.us
  machines       = lookup(var.machines, "us", [])
  server         = var.server
  pools          = lookup(var.workers, "us", {})
  force_destroy  = !var.protected
  tags           = local.tags
}

module "eu" {
  source    = "../../modules/aws/region"
  providers = { aws = aws.eu }

  name           = var.name
  cluster        = local.cluster
  region         = "eu"
  cidr           = local.cidrs.eu
  cluster_cidrs  = values(local.cidrs)
  nat            = var.nat
  operator_cidrs = var.operator_cidrs
  secrets        = module.secrets
  runs           = module.runs
  head_address   = module.head.address
  image_id       = var.image_ids.eu
  machines       = lookup(var.machines, "eu", [])
  server         = var.server
  pools          = lookup(var.workers, "eu", {})
  force_destroy  = !var.protected
  tags           = local.tags
}

module "us_eu" {
  source    = "../../modules/aws/peering"
  providers = { aws.from = aws.us, aws.to = aws.eu }

  name = "${var.name} us-eu"
  from = module.us.network
  to   = module.eu.network
}

module "head_identity" {
  source    = "../../modules/aws/identity"
  providers = { aws = aws.us }

  name             = var.name
  kind             = "head"
  cluster          = local.cluster
  secret_arns      = module.secrets.arns
  kms_key_arns     = [module.secrets.kms_key_arn, module.runs.kms_key_arn]
  bucket_arns      = [module.runs.arn]
  rents            = var.rents
  passed_role_arns = [module.us.role_arn, module.eu.role_arn]
}

module "head" {
  source    = "../../modules/aws/ray_head"
  providers = { aws = aws.us }

  name               = var.name
  image_id           = var.image_ids.us
  subnet             = module.us.head_subnet
  security_group_ids = module.us.head_security_group_ids
  instance_profile   = module.head_identity.profile
  join               = module.secrets.names
  serves             = local.clusters == null ? null : { state = "${local.clusters.folder}/${local.cluster}${local.clusters.query}" }
  protected          = var.protected
  alarm_topic_arns   = [module.spending.topic_arn]
  tags               = local.tags
}
