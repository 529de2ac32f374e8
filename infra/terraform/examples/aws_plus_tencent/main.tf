# A region of AWS and two of Tencent Cloud. The head is in eu. Tencent's regions reach each other by a
# Cloud Connect Network, the clouds each other by WireGuard: a tunnel from eu to each of them.

locals {
  cluster = coalesce(var.cluster, var.name)
  cidrs   = { eu = "10.21.0.0/16", sg = "10.30.0.0/16", jp = "10.31.0.0/16" }
  # Folder of the cluster of `geo-ray up --provider terraform`, if the head may rent.
  clusters = var.rents ? { folder = "s3://${module.runs.name}/clusters", query = "?region=eu-central-1" } : null
}

# ------------------------------------------------------------------ secrets, runs, budget

module "secrets" {
  source    = "../../modules/aws/secrets"
  providers = { aws = aws.eu }

  name          = var.name
  tls           = var.tls
  token_version = var.token_version
}

# The same token in the other cloud; Terraform does not store it.
ephemeral "aws_secretsmanager_secret_version" "token" {
  provider  = aws.eu
  secret_id = module.secrets.token_id
}

module "tencent_secrets" {
  source    = "../../modules/tencent/secrets"
  providers = { tencentcloud = tencentcloud.sg }

  name          = var.name
  region        = "ap-singapore"
  token         = ephemeral.aws_secretsmanager_secret_version.token.secret_string
  token_version = var.token_version
  tls           = var.tls
  tags          = local.tags
}

module "runs" {
  source    = "../../modules/aws/bucket"
  providers = { aws = aws.eu }

  name          = var.name
  purpose       = "runs"
  force_destroy = !var.protected
}

module "spending" {
  source    = "../../modules/aws/spending"
  providers = { aws = aws.eu }

  name          = var.name
  cluster       = local.cluster
  usd_per_month = var.usd_per_month
  emails        = var.emails
}

# ------------------------------------------------------------------ regions

module "eu" {
  source    = "../../modules/aws/region"
  providers = { aws = aws.eu }

  name           = var.name
  cluster        = local.cluster
  region         = "eu"
  cidr           = local.cidrs.eu
  cluster_cidrs  = values(local.cidrs)
  public_subnet  = true
  operator_cidrs = var.operator_cidrs
  secrets        = module.secrets
  runs           = module.runs
  head_address   = module.head.address
  image_id       = var.image_ids.eu
  machines       = lookup(var.machines, "eu", [])
  server         = lookup(var.servers, "eu", null)
  pools          = lookup(var.workers, "eu", {})
  force_destroy  = !var.protected
  tags           = local.tags
}

module "sg" {
  source    = "../../modules/tencent/region"
  providers = { tencentcloud = tencentcloud.sg }

  name            = var.name
  cluster         = local.cluster
  region          = "sg"
  at              = "ap-singapore"
  cidr            = local.cidrs.sg
  cluster_cidrs   = values(local.cidrs)
  zones           = var.zones.sg
  secrets         = module.tencent_secrets
  head_address    = module.head.address
  image_id        = var.image_ids.sg
  machines        = lookup(var.machines, "sg", [])
  server          = lookup(var.servers, "sg", null)
  pools           = lookup(var.workers, "sg", {})
  spot_max_prices = var.spot_max_prices
  force_destroy   = !var.protected
  tags            = local.tags
}

module "jp" {
  source    = "../../modules/tencent/region"
  providers = { tencentcloud = tencentcloud.jp }

  name            = var.name
  cluster         = local.cluster
  region          = "jp"
  at              = "ap-tokyo"
  cidr            = local.cidrs.jp
  cluster_cidrs   = values(local.cidrs)
  zones           = var.zones.jp
  secrets         = module.tencent_secrets
  head_address    = module.head.address
  image_id        = var.image_ids.jp
  machines        = lookup(var.machines, "jp", [])
  server          = lookup(var.servers, "jp", null)
  pools           = lookup(var.workers, "jp", {})
  spot_max_prices = var.spot_max_prices
  force_destroy   = !var.protected
  tags            = local.tags
}

# ------------------------------------------------------------------ links

module "links" {
  source    = "../../modules/tencent/links"
  providers = { tencentcloud = tencentcloud.sg }

  name = var.name
  networks = {
    sg = { vpc_id = module.sg.network.vpc_id, at = module.sg.network.at }
    jp = { vpc_id = module.jp.network.vpc_id, at = module.jp.network.at }
  }
  tags = local.tags
}

module "eu_tunnel" {
  source    = "../../modules/aws/tunnel"
  providers = { aws = aws.eu }

  name           = "${var.name}-eu"
  vpc_id         = module.eu.network.vpc_id
  cidr           = local.cidrs.eu
  subnet_id      = module.eu.public_subnet
  route_table_id = module.eu.network.route_table_id
  image_id       = var.image_ids.eu
  kms_key_arn    = module.secrets.kms_key_arn
  peers = [
    { public_key = var.tunnel_keys.sg, address = module.sg_tunnel.address, cidr = local.cidrs.sg },
    { public_key = var.tunnel_keys.jp, address = module.jp_tunnel.address, cidr = local.cidrs.jp },
  ]
}

module "sg_tunnel" {
  source    = "../../modules/tencent/tunnel"
  providers = { tencentcloud = tencentcloud.sg }

  name           = "${var.name}-sg"
  at             = "ap-singapore"
  vpc_id         = module.sg.network.vpc_id
  cidr           = local.cidrs.sg
  subnet         = module.sg.network.public_subnet
  route_table_id = module.sg.network.route_table_id
  image_id       = var.image_ids.sg
  peers          = [{ public_key = var.tunnel_keys.eu, address = module.eu_tunnel.address, cidr = local.cidrs.eu }]
  tags           = local.tags
}

module "jp_tunnel" {
  source    = "../../modules/tencent/tunnel"
  providers = { tencentcloud = tencentcloud.jp }

  name           = "${var.name}-jp"
  at             = "ap-tokyo"
  vpc_id         = module.jp.network.vpc_id
  cidr           = local.cidrs.jp
  subnet         = module.jp.network.public_subnet
  route_table_id = module.jp.network.route_table_id
  image_id       = var.image_ids.jp
  peers          = [{ public_key = var.tunnel_keys.eu, address = module.eu_tunnel.address, cidr = local.cidrs.eu }]
  tags           = local.tags
}

# ------------------------------------------------------------------ head

module "head_identity" {
  source    = "../../modules/aws/identity"
  providers = { aws = aws.eu }

  name             = var.name
  kind             = "head"
  cluster          = local.cluster
  secret_arns      = module.secrets.arns
  kms_key_arns     = [module.secrets.kms_key_arn, module.runs.kms_key_arn]
  bucket_arns      = [module.runs.arn]
  rents            = var.rents
  passed_role_arns = [module.eu.role_arn]
}

module "head" {
  source    = "../../modules/aws/ray_head"
  providers = { aws = aws.eu }

  name               = var.name
  image_id           = var.image_ids.eu
  subnet             = module.eu.head_subnet
  security_group_ids = module.eu.head_security_group_ids
  instance_profile   = module.head_identity.profile
  join               = module.secrets.names
  serves             = local.clusters == null ? null : { state = "${local.clusters.folder}/${local.cluster}${local.clusters.query}" }
  protected          = var.protected
  alarm_topic_arns   = [module.spending.topic_arn]
  tags               = local.tags
}
