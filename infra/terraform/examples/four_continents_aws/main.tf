# Regions of AWS on four continents, with a private link between every two. The head is in us.

locals {
  cluster = coalesce(var.cluster, var.name)
  cidrs   = { us = "10.20.0.0/16", eu = "10.21.0.0/16", asia = "10.22.0.0/16", sa = "10.23.0.0/16" }
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

module "asia" {
  source    = "../../modules/aws/region"
  providers = { aws = aws.asia }

  name           = var.name
  cluster        = local.cluster
  region         = "asia"
  cidr           = local.cidrs.asia
  cluster_cidrs  = values(local.cidrs)
  nat            = var.nat
  operator_cidrs = var.operator_cidrs
  secrets        = module.secrets
  runs           = module.runs
  head_address   = module.head.address
  image_id       = var.image_ids.asia
  machines       = lookup(var.machines, "asia", [])
  server         = var.server
  pools          = lookup(var.workers, "asia", {})
  force_destroy  = !var.protected
  tags           = local.tags
}

module "sa" {
  source    = "../../modules/aws/region"
  providers = { aws = aws.sa }

  name           = var.name
  cluster        = local.cluster
  region         = "sa"
  cidr           = local.cidrs.sa
  cluster_cidrs  = values(local.cidrs)
  nat            = var.nat
  operator_cidrs = var.operator_cidrs
  secrets        = module.secrets
  runs           = module.runs
  head_address   = module.head.address
  image_id       = var.image_ids.sa
  machines       = lookup(var.machines, "sa", [])
  server         = var.server
  pools          = lookup(var.workers, "sa", {})
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

module "us_asia" {
  source    = "../../modules/aws/peering"
  providers = { aws.from = aws.us, aws.to = aws.asia }

  name = "${var.name} us-asia"
  from = module.us.network
  to   = module.asia.network
}

module "us_sa" {
  source    = "../../modules/aws/peering"
  providers = { aws.from = aws.us, aws.to = aws.sa }

  name = "${var.name} us-sa"
  from = module.us.network
  to   = module.sa.network
}

module "eu_asia" {
  source    = "../../modules/aws/peering"
  providers = { aws.from = aws.eu, aws.to = aws.asia }

  name = "${var.name} eu-asia"
  from = module.eu.network
  to   = module.asia.network
}

module "eu_sa" {
  source    = "../../modules/aws/peering"
  providers = { aws.from = aws.eu, aws.to = aws.sa }

  name = "${var.name} eu-sa"
  from = module.eu.network
  to   = module.sa.network
}

module "asia_sa" {
  source    = "../../modules/aws/peering"
  providers = { aws.from = aws.asia, aws.to = aws.sa }

  name = "${var.name} asia-sa"
  from = module.asia.network
  to   = module.sa.network
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
  passed_role_arns = [module.us.role_arn, module.eu.role_arn, module.asia.role_arn, module.sa.role_arn]
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
